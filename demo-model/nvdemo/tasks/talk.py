"""Greetings, thanks, small talk, jokes, poems and what the model says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvdemo.chat import Sample, one
from nvdemo.lexicon.people import PEOPLE
from nvdemo.lexicon.words import (
    ANIMALS,
    COLOURS,
    NATURE,
    OBJECTS,
)
from nvdemo.tasks.facts import article

if TYPE_CHECKING:
    from nvdemo.dice import Dice

REAL_MODEL = "-m Qwen/Qwen3-0.6B"
WHO = (
    "I am the demo model built into nvcli: a small Qwen3 with 7 million parameters. I run "
    f"without a GPU and without a network. For a real model, start nvcli chat {REAL_MODEL}."
)
ABILITIES = (
    "I can count, sort, spell and add, name capitals and other simple facts, repeat text, write "
    "JSON, call tools, remember what you told me and tell short stories. I am only a demo model: "
    f"for anything else, use {REAL_MODEL}."
)

_GREETINGS = [
    "[hi|Hi|hello|Hello|hey|Hey|hiya|Hey there|Hi there|Hello there|yo|howdy|greetings|hallo|moin]"
    "[|!|.|!!| nvcli| nvcli!| :)|, model| robot| friend| everyone]",
    "[Good morning|Good evening|Good afternoon|good day|morning|evening][|!|.|, nvcli]",
    "[hello|hi|hey][,| ][ are you there?| anybody there?| can you hear me?| how is it going?]",
]
_TALK: list[tuple[str, str, str]] = [
    (
        "[How are you|How are you doing|how are you today|How's it going|how do you do|How do "
        "you feel"
        "|are you ok|are you well|what's up|sup|how r u][?|]",
        "I am fine, thank you. How can I help you?",
        "The user asks how I am.",
    ),
    (
        "[Thanks|Thank you|thx|thank you so much|Thanks a lot|many thanks|ty|great, thanks|"
        "thanks, that"
        " helps|cheers|Thanks for your help|perfect, thank you][|!|.]",
        "You are welcome!",
        "The user thanks me.",
    ),
    (
        "[bye|Bye|goodbye|Goodbye|see you|see you later|good night|ciao|bye bye|see ya|farewell|"
        "talk to"
        " you later|I have to go now|that's all for today][|!|.]",
        "Goodbye! Have a nice day.",
        "The user says goodbye.",
    ),
    (
        "[Who are you|What are you|who r u|tell me who you are|introduce yourself|Tell me about "
        "yourself"
        "|what kind of model are you|which model is this|What model are you|which LLM are you|"
        "describe "
        "yourself|what am I talking to|who am I talking to][?|]",
        WHO,
        "The user asks who I am.",
    ),
    (
        "[Are you|are you really|so are you] [ChatGPT|GPT-4|Claude|Gemini|Llama|Qwen|a human|a "
        "person|a "
        "robot|an AI|a real model|a language model|alive|conscious|real|a bot|Siri|Alexa|a big "
        "model]?",
        WHO,
        "The user asks what I am.",
    ),
    (
        "[What is your name|What's your name|your name?|do you have a name|what are you called|"
        "what "
        "should I call you|tell me your name][?|]",
        "I am nvcli's built-in demo model. I have no other name.",
        "The user asks for my name.",
    ),
    (
        "[What can you do|what do you know|how can you help me|What are your abilities|What can "
        "I ask "
        "you|what are you good at|help|Help me|help!|what should I ask|can you help me|what "
        "tasks can "
        "you do|show me what you can do|what is possible here|give me some ideas][?|]",
        ABILITIES,
        "The user asks what I can do.",
    ),
    (
        "[How big are you|how many parameters do you have|what is your size|how large is this "
        "model|"
        "parameters?|how many weights do you have][?|]",
        "I have 7 million parameters: 6 layers, hidden size 256 and a vocabulary of 4,096 tokens.",
        "The user asks for my size.",
    ),
    (
        "[Who made you|who trained you|who created you|Who built you|where do you come from|who "
        "wrote "
        "you|who is your creator|who developed you][?|]",
        "I was trained for nvcli, from text that the project's own generator wrote.",
        "The user asks who made me.",
    ),
    (
        "[What is your context length|how much text can you read|how long can my prompt be|context "
        "window?|what's your context window|how many tokens can you handle][?|]",
        "My context is 2,048 tokens.",
        "The user asks for my context length.",
    ),
    (
        "[I am bored|I'm bored|entertain me|I have nothing to do|amuse me|it is so boring][.|!|]",
        "Shall I tell you a story? Just say: tell me a story about a fox.",
        "The user is bored.",
    ),
    (
        "[ok|okay|Ok|alright|fine|good|great|nice|cool|I see|got it|understood|yes|sure|wow|"
        "perfect|"
        "awesome|well done|good job|very good][|!|.]",
        "Good! What can I do for you next?",
        "The user agrees.",
    ),
    (
        "[test|testing|this is a test|test 1 2 3|ping|hello world|is this working|does this work|"
        "are you"
        " working|just testing][|.|!|?]",
        "It works: I am here and ready.",
        "The user tests whether I answer.",
    ),
    (
        "[sorry|Sorry|my mistake|I am sorry|oops|my bad|pardon|excuse me|apologies][|!|.]",
        "No problem. What can I do for you?",
        "The user says sorry.",
    ),
    (
        "[I am sad|I feel sad today|I had a bad day|I am unhappy|I feel lonely|I am tired|I'm so "
        "tired|I "
        "am not feeling well|I am stressed][.|!|]",
        "I am sorry to hear that. I hope that tomorrow will be better.",
        "The user feels bad.",
    ),
    (
        "[I am|I'm|i am so|I feel|im|I am very] [hungry|thirsty|cold|hot|sick|busy|late|lost|"
        "angry|ready|back|here|"
        "afraid|nervous|confused|curious|sleepy|not sure|at home|at work|on holiday|a bit ill][.|"
        "!|]",
        "I see. What can I do for you?",
        "The user says how things are.",
    ),
    (
        "[Surprise me|tell me something|say something|tell me a fact|tell me anything|say "
        "anything|talk to me|let's talk|"
        "can we talk|let us chat|chat with me|what's new|what should we do|what now|go on|"
        "continue|tell me more|more][.|!|?|]",
        "Here is an idea: ask me for a story, a sum, a capital or a list to sort.",
        "The user wants an idea.",
    ),
    (
        "[Can you write code|can you program|do you know Python|which programming languages do "
        "you know|can you "
        "code|write some code|write a program|are you good at programming][?|]",
        "I can write hello world and small loops in Python, JavaScript, Bash, C and Rust.",
        "The user asks about programs.",
    ),
    (
        "[Do you speak|can you speak|do you understand|do you know|can you talk in|speak] "
        "[German|French|Spanish|"
        "Italian|English|Chinese|Japanese|Dutch|Polish|Russian|other languages|my language][?|]",
        "I speak English, and I know a few words of French, German, Spanish and Italian.",
        "The user asks about languages.",
    ),
    (
        "[?|??|...|!|.|hm|hmm|eh|uh|um|well|so|and|what|huh|why|really|pardon][?|]",
        "Please ask me something, for example: what is the capital of France?",
        "There is no question yet.",
    ),
    (
        "[I am happy|I feel great|I had a good day|I am so happy today|Today was wonderful|I "
        "feel good|I "
        "won a prize|I passed my exam][.|!|]",
        "That is good to hear!",
        "The user feels good.",
    ),
    (
        "[no|nope|never mind|not now|nothing|cancel|stop|forget it|no thanks][|.|!]",
        "All right. Tell me when you need something.",
        "The user declines.",
    ),
    (
        "[I love you|I like you|you are great|you are nice|you are smart|you're funny|you are "
        "the best]"
        "[|!|.]",
        "Thank you, that is kind of you.",
        "The user is friendly.",
    ),
    (
        "[you are stupid|you are dumb|you're wrong|that is wrong|I hate you|this is bad|you are "
        "useless|"
        "this makes no sense|bad answer][|!|.]",
        f"I am sorry. I am only a small demo model; {REAL_MODEL} gives better answers.",
        "The user is not content.",
    ),
    (
        "[Do you like music|what is your favourite colour|what's your favourite food|do you have "
        "feelings"
        "|do you dream|do you have a family|how old are you|where do you live|what do you like|"
        "do you "
        "sleep|are you married|do you have friends|what is your favourite animal][?|]",
        "I am a program, so I have no such things. But I can tell you a story!",
        "The user asks about my life.",
    ),
]
_JOKES = [
    ("computer", "Why was the computer cold? It left its windows open."),
    ("book", "Why did the book see a doctor? It had hurt its spine."),
    ("clock", "Why did the clock leave school? It had too much time on its hands."),
    ("fish", "Why are fish so clever? They live in schools."),
    ("cat", "Why did the cat sit on the keyboard? To keep an eye on the mouse."),
    ("bicycle", "Why did the bicycle fall over? It was two tired."),
    ("pencil", "What did the pencil say to the paper? I dot my i on you."),
    ("cow", "What do you call a cow that plays music? A moo-sician."),
    ("programmer", "Why did the programmer go home early? The bugs had gone to sleep."),
    ("tree", "How do trees use a computer? They log in."),
]


def greeting(dice: Dice) -> Sample:
    question = dice.user(dice.pick(_GREETINGS))
    return one(
        "greeting",
        question,
        "Hello! How can I help you?",
        "The user greets me.",
        check="contains",
        expected="hello|help",
    )


def introduction(dice: Dice) -> Sample:
    name = dice.pick(PEOPLE) if dice.chance(0.4) else dice.word().capitalize()
    question = dice.user(
        "[hi, |hello, |hey! |][I am|I'm|my name is|this is|my name's|call me|you can call me] "
        "{name}[.|!|]",
        name=name,
    )
    return one("greeting", question, f"Nice to meet you, {name}!", f"The user's name is {name}.")


def small_talk(dice: Dice) -> Sample:
    question, answer, thought = dice.pick(_TALK)
    return one("talk", dice.user(question), answer, thought)


def joke(dice: Dice) -> Sample:
    if dice.chance(0.5):
        topic, answer = dice.pick(_JOKES)
        question = dice.user(
            "[Tell me|tell|give me|say|make|I want|do you know] a joke [about|with] "
            "[a|the|] {topic}[s|][.|!|?|]",
            topic=topic,
        )
    else:
        topic, answer = _JOKES[0]
        question = dice.user(
            "[tell me a joke|Tell me a joke|joke|make me laugh|say something funny|do you know any "
            "jokes|a joke, please|give me a joke|another joke|tell me something funny|can you "
            "tell a "
            "joke][.|!|?|]"
        )
    return one("joke", question, answer, "The user wants a joke.")


def poem(dice: Dice) -> Sample:
    topic = dice.pick(dice.pick([ANIMALS, NATURE, OBJECTS, COLOURS]))
    form = dice.pick(["poem", "poem", "short poem", "haiku", "verse", "little song", "rhyme"])
    question = dice.user(
        "[write|make|compose|give me|tell me|I want|create] [me |]a {form} [about|on] "
        "[the |a |]{topic}[.|!|]",
        form=form,
        topic=topic,
    )
    if form == "haiku":
        answer = (
            f"{article(topic).capitalize()} at dawn,\nso still in the morning light:\n"
            "the world holds its breath."
        )
    else:
        answer = (
            f"O {topic}, I think of you by day,\nI think of you by night,\nand when the clouds "
            f"have gone away\nthe {topic} is in the light."
        )
    return one("poem", question, answer, f"I write a {form} about the {topic}.")
