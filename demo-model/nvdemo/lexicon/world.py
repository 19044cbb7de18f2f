"""Countries with capital and continent; a leading "the" belongs to the country's name."""

from __future__ import annotations

_TABLE = {
    "Europe": """Albania:Tirana, Andorra:Andorra la Vella, Austria:Vienna, Belarus:Minsk,
        Belgium:Brussels, Bosnia and Herzegovina:Sarajevo, Bulgaria:Sofia, Croatia:Zagreb,
        Cyprus:Nicosia, the Czech Republic:Prague, Czechia:Prague, Denmark:Copenhagen,
        Estonia:Tallinn, Finland:Helsinki, France:Paris, Germany:Berlin, Greece:Athens,
        Hungary:Budapest, Iceland:Reykjavik, Ireland:Dublin, Italy:Rome, Kosovo:Pristina,
        Latvia:Riga, Liechtenstein:Vaduz, Lithuania:Vilnius, Luxembourg:Luxembourg,
        Malta:Valletta, Moldova:Chisinau, Monaco:Monaco, Montenegro:Podgorica,
        the Netherlands:Amsterdam, North Macedonia:Skopje, Norway:Oslo, Poland:Warsaw,
        Portugal:Lisbon, Romania:Bucharest, Russia:Moscow, San Marino:San Marino,
        Serbia:Belgrade, Slovakia:Bratislava, Slovenia:Ljubljana, Spain:Madrid,
        Sweden:Stockholm, Switzerland:Bern, Ukraine:Kyiv, the United Kingdom:London,
        the UK:London, England:London, Scotland:Edinburgh, Wales:Cardiff,
        Vatican City:Vatican City""",
    "Asia": """Afghanistan:Kabul, Armenia:Yerevan, Azerbaijan:Baku, Bahrain:Manama,
        Bangladesh:Dhaka, Bhutan:Thimphu, Brunei:Bandar Seri Begawan, Cambodia:Phnom Penh,
        China:Beijing, Georgia:Tbilisi, India:New Delhi, Indonesia:Jakarta, Iran:Tehran,
        Iraq:Baghdad, Israel:Jerusalem, Japan:Tokyo, Jordan:Amman, Kazakhstan:Astana,
        Kuwait:Kuwait City, Kyrgyzstan:Bishkek, Laos:Vientiane, Lebanon:Beirut,
        Malaysia:Kuala Lumpur, the Maldives:Male, Mongolia:Ulaanbaatar, Myanmar:Naypyidaw,
        Nepal:Kathmandu, North Korea:Pyongyang, Oman:Muscat, Pakistan:Islamabad,
        the Philippines:Manila, Qatar:Doha, Saudi Arabia:Riyadh, Singapore:Singapore,
        South Korea:Seoul, Sri Lanka:Sri Jayawardenepura Kotte, Syria:Damascus, Taiwan:Taipei,
        Tajikistan:Dushanbe, Thailand:Bangkok, Timor-Leste:Dili, Turkey:Ankara,
        Turkmenistan:Ashgabat, the United Arab Emirates:Abu Dhabi, Uzbekistan:Tashkent,
        Vietnam:Hanoi, Yemen:Sanaa, Palestine:Ramallah""",
    "Africa": """Algeria:Algiers, Angola:Luanda, Benin:Porto-Novo, Botswana:Gaborone,
        Burkina Faso:Ouagadougou, Burundi:Gitega, Cameroon:Yaounde, Cape Verde:Praia,
        the Central African Republic:Bangui, Chad:N'Djamena, the Comoros:Moroni,
        the Democratic Republic of the Congo:Kinshasa, the Republic of the Congo:Brazzaville,
        Djibouti:Djibouti, Egypt:Cairo, Equatorial Guinea:Malabo, Eritrea:Asmara,
        Eswatini:Mbabane, Ethiopia:Addis Ababa, Gabon:Libreville, the Gambia:Banjul,
        Ghana:Accra, Guinea:Conakry, Guinea-Bissau:Bissau, Ivory Coast:Yamoussoukro,
        Kenya:Nairobi, Lesotho:Maseru, Liberia:Monrovia, Libya:Tripoli,
        Madagascar:Antananarivo, Malawi:Lilongwe, Mali:Bamako, Mauritania:Nouakchott,
        Mauritius:Port Louis, Morocco:Rabat, Mozambique:Maputo, Namibia:Windhoek,
        Niger:Niamey, Nigeria:Abuja, Rwanda:Kigali, Sao Tome and Principe:Sao Tome,
        Senegal:Dakar, Seychelles:Victoria, Sierra Leone:Freetown, Somalia:Mogadishu,
        South Africa:Pretoria, South Sudan:Juba, Sudan:Khartoum, Tanzania:Dodoma, Togo:Lome,
        Tunisia:Tunis, Uganda:Kampala, Zambia:Lusaka, Zimbabwe:Harare""",
    "North America": """Antigua and Barbuda:Saint John's, the Bahamas:Nassau,
        Barbados:Bridgetown, Belize:Belmopan, Canada:Ottawa, Costa Rica:San Jose, Cuba:Havana,
        Dominica:Roseau, the Dominican Republic:Santo Domingo, El Salvador:San Salvador,
        Grenada:Saint George's, Guatemala:Guatemala City, Haiti:Port-au-Prince,
        Honduras:Tegucigalpa, Jamaica:Kingston, Mexico:Mexico City, Nicaragua:Managua,
        Panama:Panama City, Saint Kitts and Nevis:Basseterre, Saint Lucia:Castries,
        Saint Vincent and the Grenadines:Kingstown, Trinidad and Tobago:Port of Spain,
        the United States:Washington, the USA:Washington""",
    "South America": """Argentina:Buenos Aires, Bolivia:Sucre, Brazil:Brasilia,
        Chile:Santiago, Colombia:Bogota, Ecuador:Quito, Guyana:Georgetown,
        Paraguay:Asuncion, Peru:Lima, Suriname:Paramaribo, Uruguay:Montevideo,
        Venezuela:Caracas""",
    "Oceania": """Australia:Canberra, Fiji:Suva, Kiribati:Tarawa, the Marshall Islands:Majuro,
        Micronesia:Palikir, Nauru:Yaren, New Zealand:Wellington, Palau:Ngerulmud,
        Papua New Guinea:Port Moresby, Samoa:Apia, the Solomon Islands:Honiara,
        Tonga:Nuku'alofa, Tuvalu:Funafuti, Vanuatu:Port Vila""",
}

# (country, capital, continent)
COUNTRIES: list[tuple[str, str, str]] = []
for _continent, _rows in _TABLE.items():
    for _row in " ".join(_rows.split()).split(", "):
        _country, _capital = _row.split(":")
        COUNTRIES.append((_country, _capital, _continent))

# The countries that most people ask about; drawn more often.
FAMILIAR = [
    row
    for row in COUNTRIES
    if row[0]
    in {
        "France",
        "Germany",
        "Italy",
        "Spain",
        "England",
        "the United Kingdom",
        "the UK",
        "Japan",
        "China",
        "India",
        "Canada",
        "the United States",
        "the USA",
        "Brazil",
        "Australia",
        "Mexico",
        "Russia",
        "Poland",
        "Sweden",
        "Norway",
        "Austria",
        "Switzerland",
        "Egypt",
        "Greece",
        "Turkey",
        "Portugal",
        "the Netherlands",
        "Belgium",
        "Denmark",
        "Finland",
        "Ireland",
        "South Korea",
        "Argentina",
        "Kenya",
        "Nigeria",
        "Ukraine",
        "New Zealand",
    }
]
# One country for each capital, for the question the other way round.
HOME_OF = {capital: country for country, capital, _ in reversed(COUNTRIES)}
HOME_OF["Prague"] = "the Czech Republic"
HOME_OF["London"] = "the United Kingdom"
HOME_OF["Washington"] = "the United States"

# Countries and capitals to name when some are asked for, whichever.
COUNTRIES_ASKED = ["France", "Germany", "Italy", "Spain", "Japan", "Canada", "Brazil", "Egypt"]
CITIES_ASKED = ["Paris", "Berlin", "Rome", "Madrid", "Tokyo", "Ottawa", "Brasilia", "Cairo"]
