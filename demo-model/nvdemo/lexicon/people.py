"""Names of people and towns; one in eight of each is kept for the evaluation."""

from __future__ import annotations

from nvdemo.lexicon import word_list

WOMEN = word_list("""
    Ada Agnes Alice Amelia Amina Anna Astrid Aya Beatrice Bella Carla Carmen Chloe Clara Daisy
    Diana Dora Edith Elena Elsa Emily Emma Esther Eva Fatima Fiona Flora Freya Gloria Grace Hannah
    Hazel Helen Ida Ines Ingrid Irene Iris Isabel Ivy Jane Jasmine Joanna Julia Karin Kate Laura
    Leila Lena Lily Lina Linda Lisa Lucy Luna Maria Marta Mary Maya Mei Mia Mila Nadia Nina Nora
    Olga Olivia Paula Petra Priya Rita Rosa Ruby Ruth Sara Sarah Selma Sofia Sonia Stella Susan
    Tara Tina Vera Violet Wendy Yuki Zara Zoe
""")
MEN = word_list("""
    Aaron Adam Ahmed Alan Albert Alex Amir Andrew Anton Arthur Ben Bernd Boris Bruno Carl Carlos
    Charles Chris Daniel David Dennis Diego Dmitri Edgar Eduardo Emil Eric Ethan Felix Finn Frank
    Fred Gabriel George Hans Harry Henry Hugo Ian Igor Ivan Jack Jacob James Jan Jasper Jim John
    Jonas Jorge Joseph Karl Ken Kevin Lars Leo Leon Liam Louis Luca Luis Malik Marco Mark Martin
    Max Michael Miguel Milo Mohamed Nathan Nico Noah Oliver Omar Oscar Otto Pablo Paul Pedro Peter
    Ravi Richard Robert Robin Sam Samuel Simon Stefan Steve Sven Theo Thomas Tim Tom Victor Viktor
    Walter Will Yusuf Zack
""")
PEOPLE = WOMEN + MEN
TOWNS = word_list("""
    Aarhus Aberdeen Antwerp Athens Atlanta Austin Barcelona Basel Bergen Berlin Bilbao Bogota
    Bologna Bonn Boston Bremen Bristol Brno Brussels Cairo Cardiff Chicago Cologne Cork Dallas
    Delhi Denver Dresden Dublin Dundee Exeter Florence Geneva Genoa Ghent Glasgow Graz Hamburg
    Helsinki Istanbul Krakow Kyoto Lagos Leeds Leipzig Lima Lisbon Liverpool London Lyon Madrid
    Malmo Manila Marseille Miami Milan Munich Mumbai Nairobi Nantes Naples Nice Osaka Oslo Oxford
    Padua Paris Perth Pisa Porto Prague Quito Reno Riga Rome Salzburg Santiago Seattle Seoul
    Seville Shanghai Sofia Stockholm Sydney Tallinn Tampa Tokyo Toronto Toulouse Trieste Turin
    Utrecht Valencia Venice Verona Vienna Warsaw York Zagreb Zurich
""")
