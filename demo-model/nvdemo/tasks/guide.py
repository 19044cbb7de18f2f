"""Questions about nvcli itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvdemo.chat import Sample, one

if TYPE_CHECKING:
    from nvdemo.dice import Dice

# (what the user wants, answer, what the question is about)
_GUIDE: list[tuple[str, str, str]] = [
    (
        "[What is nvcli|what does nvcli do|explain nvcli|tell me about nvcli|what is this "
        "program|What is this tool|"
        "nvcli?|describe nvcli|what is nvcli for][?|]",
        "nvcli runs Qwen3 language models in the terminal: chat, batch, serve and bench, on "
        "NVIDIA GPUs and on the "
        "CPU.",
        "nvcli itself",
    ),
    (
        "[How do I use a real model|How can I get a better model|how do I load another model|"
        "which flag chooses the "
        "model|how do I change the model|use a bigger model|how to use Qwen3|how do I switch to "
        "a real model|can I use "
        "another model|where do I get a real model|what is -m|what does -m do|how do I choose a "
        "model|I want a better "
        "model|load a different model][?|]",
        "Name it with -m: nvcli chat -m Qwen/Qwen3-0.6B. NVCLI_MODEL or the configuration file "
        "set it for good.",
        "the flag -m",
    ),
    (
        "[Which commands does nvcli have|what commands are there|list the commands of nvcli|"
        "nvcli commands|commands?|"
        "what are the nvcli commands|show me all commands][?|]",
        "The commands are chat, batch, serve, bench, models, tokens, doctor and completion. "
        "nvcli --help lists them.",
        "the commands",
    ),
    (
        "[What does nvcli chat do|how do I chat|nvcli chat?|what is the chat command|explain "
        "nvcli chat|how does chat "
        "work|start a chat][?|]",
        'nvcli chat opens a chat in the terminal; nvcli chat "question" answers once and ends.',
        "nvcli chat",
    ),
    (
        "[What does nvcli batch do|how do I run a batch|nvcli batch?|what is the batch command|"
        "explain nvcli batch|how "
        "can I process many prompts|process a file of prompts|how do I run many prompts][?|]",
        "nvcli batch reads prompts from a JSONL file and writes an answer for each: nvcli batch "
        "in.jsonl -o out.jsonl.",
        "nvcli batch",
    ),
    (
        "[What does nvcli serve do|how do I start a server|nvcli serve?|what is the serve "
        "command|explain nvcli serve|"
        "is there an API|how do I get an OpenAI API|how do I serve a model|start the server][?|]",
        "nvcli serve starts an OpenAI-compatible HTTP server for a model.",
        "nvcli serve",
    ),
    (
        "[What does nvcli bench do|how do I measure speed|nvcli bench?|what is the bench command|"
        "explain nvcli bench|how "
        "fast is this model|how do I benchmark|run a benchmark][?|]",
        "nvcli bench measures latency and throughput and shows them on one card.",
        "nvcli bench",
    ),
    (
        "[What does nvcli doctor do|nvcli doctor?|how do I check my GPU|is my GPU ok|check my "
        "installation|explain nvcli "
        "doctor][?|]",
        "nvcli doctor checks driver, GPU memory, model files and terminal, and says what blocks.",
        "nvcli doctor",
    ),
    (
        "[What does nvcli models do|nvcli models?|how do I download a model|how do I pull a "
        "model|list my models|which "
        "models do I have|how do I remove a model|explain nvcli models][?|]",
        "nvcli models lists, shows, pulls, removes and verifies models: nvcli models pull "
        "Qwen/Qwen3-0.6B.",
        "nvcli models",
    ),
    (
        "[What does nvcli tokens do|nvcli tokens?|how do I count tokens|how many tokens has my "
        "text|explain nvcli tokens]"
        "[?|]",
        'nvcli tokens counts the tokens of a text: nvcli tokens "your text".',
        "nvcli tokens",
    ),
    (
        "[How do I exit|how do I quit|how can I leave the chat|exit|quit|how to stop nvcli|how "
        "do I end the chat|leave]"
        "[?|]",
        "Type /exit or press Ctrl-D on an empty line.",
        "/exit",
    ),
    (
        "[What is /help|how do I see the commands in the chat|how do I get help|where is help|"
        "what slash commands are "
        "there|show the chat commands|which commands can I type here][?|]",
        "Type /help in the chat: it lists every command.",
        "/help",
    ),
    (
        "[How do I turn thinking off|how do I switch thinking on|what is /think|disable thinking|"
        "stop thinking|can you "
        "think|how does thinking work|turn off thinking|what does --no-think do|enable "
        "thinking][?|]",
        "Type /think off or /think on in the chat; --no-think does it for one command.",
        "thinking",
    ),
    (
        "[How do I clear the chat|how do I start a new chat|what is /clear|start over|new "
        "conversation|reset the "
        "chat|forget everything][?|]",
        "Type /clear to begin a new conversation.",
        "/clear",
    ),
    (
        "[How do I undo|what is /undo|take back my last message|how do I remove the last "
        "message][?|]",
        "Type /undo to take back the last question and its answer.",
        "/undo",
    ),
    (
        "[How do I retry|what is /retry|give another answer|how do I get a new answer|"
        "regenerate][?|]",
        "Type /retry to get a new answer to the last question.",
        "/retry",
    ),
    (
        "[How do I set the system prompt|what is /system|change the system prompt|how do I give "
        "you a role][?|]",
        'Type /system and the text, or start with nvcli chat -s "text".',
        "/system",
    ),
    (
        "[How do I change the temperature|how do I set the temperature|what is --temperature|set "
        "temperature|make "
        "answers more random][?|]",
        "Use -t 0.7 on the command line or /set temperature 0.7 in the chat.",
        "the temperature",
    ),
    (
        "[How do I save the chat|what is /save|save this conversation|how do I load a chat|how "
        "do I continue a chat]"
        "[?|]",
        "Type /save NAME to keep the chat and /load NAME to come back to it.",
        "/save",
    ),
    (
        "[How do I export the chat|what is /export|export to markdown][?|]",
        "Type /export chat.md; .json, .jsonl and .txt work as well.",
        "/export",
    ),
    (
        "[How do I attach a file|can you read a file|what is -f|how do I add a file to the "
        "prompt|what is /file][?|]",
        'Use nvcli chat -f FILE "question", or /file PATH in the chat.',
        "files",
    ),
    (
        "[How do I pipe text|can I pipe text into nvcli|does nvcli read stdin|how do I use nvcli "
        "in a pipe][?|]",
        'Pipe it in: cat notes.txt | nvcli chat "summarise". The answer alone goes to standard '
        "output.",
        "pipes",
    ),
    (
        "[How do I get JSON output|what is --json|how do I get json|machine readable output][?|]",
        'Add --json: nvcli chat "question" --json prints one object.',
        "--json",
    ),
    (
        "[What is --schema|how do I force a schema|can nvcli follow a JSON schema|structured "
        "output][?|]",
        "Use --schema FILE: the answer then matches that JSON schema.",
        "--schema",
    ),
    (
        "[Do I need a GPU|does nvcli need a GPU|can nvcli run on the CPU|does it work without a "
        "GPU|can I use nvcli "
        "without a GPU][?|]",
        "No: nvcli runs on the CPU too, only slower. A GPU by NVIDIA makes it fast.",
        "the GPU",
    ),
    (
        "[Do I need the internet|does nvcli need a network|can you go online|are you online|do "
        "you have internet access|"
        "does nvcli send my data anywhere|is my data private|does this work offline][?|]",
        "No: this demo model ships with nvcli and runs on your machine, without a network.",
        "the network",
    ),
    (
        "[How do I limit the answer|what is -n|max tokens|how do I get shorter answers|limit the "
        "number of tokens][?|]",
        "Use -n 100 to end the answer after 100 tokens.",
        "-n",
    ),
    (
        "[How do I set a seed|what is --seed|make the answer reproducible|how do I get the same "
        "answer again][?|]",
        "Use --seed 1 and the same settings: the answer is then the same again.",
        "--seed",
    ),
    (
        "[Which licence does nvcli have|what is the license|is nvcli free|is nvcli open source|"
        "can I use nvcli at work]"
        "[?|]",
        "nvcli and this demo model are free software under the Apache License 2.0.",
        "the licence",
    ),
    (
        "[How do I write several lines|how do I enter a newline|multi-line input|newline in the "
        "chat][?|]",
        "Press Alt+Enter or Ctrl+J for a new line; Enter sends.",
        "new lines",
    ),
    (
        "[How do I stop an answer|how do I interrupt you|how do I cancel|stop generating][?|]",
        "Press Ctrl-C: the answer stops and what was written is kept.",
        "Ctrl-C",
    ),
    (
        "[What is Qwen3|tell me about Qwen3|who made Qwen3|what is Qwen][?|]",
        "Qwen3 is a family of language models by the Qwen team; nvcli runs them. I am a tiny "
        "one, trained for nvcli.",
        "Qwen3",
    ),
    (
        "[What is a token|what are tokens|explain tokens|define token][?|]",
        "A token is a piece of text, a word or a part of one, that a language model reads and "
        "writes.",
        "tokens",
    ),
    (
        "[What is speculative decoding|does nvcli have speculative decoding|what is a draft "
        "model][?|]",
        "A small draft model guesses tokens and the large one checks them together; that is "
        "speculative decoding.",
        "speculative decoding",
    ),
]


def guide(dice: Dice) -> Sample:
    question, answer, topic = dice.pick(_GUIDE)
    return one("guide", dice.user(question), answer, f"The question is about {topic}.")
