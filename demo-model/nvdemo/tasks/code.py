"""A few programs that fit a tiny model: hello world, loops, printing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvdemo.chat import Sample, one
from nvdemo.lexicon.words import ALL_WORDS

if TYPE_CHECKING:
    from nvdemo.dice import Dice

# language: (names users type, fence, print line, loop from {a} to {b})
_LANGUAGES: dict[str, tuple[list[str], str, str, str]] = {
    "Python": (
        ["Python", "python", "py", "Python 3"],
        "python",
        'print("{x}")',
        "for i in range({a}, {b} + 1):\n    print(i)",
    ),
    "JavaScript": (
        ["JavaScript", "javascript", "js"],
        "javascript",
        'console.log("{x}");',
        "for (let i = {a}; i <= {b}; i++) {{\n  console.log(i);\n}}",
    ),
    "Bash": (
        ["Bash", "bash", "shell", "sh"],
        "bash",
        'echo "{x}"',
        "for i in $(seq {a} {b}); do\n  echo $i\ndone",
    ),
    "C": (
        ["C", "the C language"],
        "c",
        '#include <stdio.h>\n\nint main(void) {{\n  puts("{x}");\n}}',
        "#include <stdio.h>\n\nint main(void) {{\n  for (int i = {a}; i <= {b}; i++) "
        'printf("%d\\n", i);\n}}',
    ),
    "Rust": (
        ["Rust", "rust"],
        "rust",
        'fn main() {{\n    println!("{x}");\n}}',
        'fn main() {{\n    for i in {a}..={b} {{\n        println!("{{i}}");\n    }}\n}}',
    ),
}


def code(dice: Dice) -> Sample:
    language = dice.pick(["Python", "Python", *_LANGUAGES])
    names, fence, line, loop = _LANGUAGES[language]
    name = dice.pick(names)
    roll = dice.random()
    if roll < 0.4:
        question = dice.user(
            "[Hello world in {x}|hello world {x}|Write hello world in {x}.|{x} hello world|Show "
            "me a "
            "hello world program in {x}.|write a hello world in {x}|How do I print hello world in "
            "{x}?|code for hello world in {x}]",
            x=name,
        )
        body = line.format(x="Hello, world!")
    elif roll < 0.75:
        text = " ".join(
            dice.pick(ALL_WORDS) if dice.chance(0.6) else dice.word()
            for _ in range(dice.number(1, 3))
        )
        question = dice.user("[Write|Give me|Show me] {x}", x=f"{name} code that prints {text}")
        body = line.format(x=text)
    else:
        low, high = dice.pick([1, 1, dice.number(0, 9)]), dice.number(10, 99)
        task = dice.pick(["prints the numbers", "counts"])
        question = dice.user(
            "[Write|Give me|Show me|I need] {x}",
            x=f"{name} code that {task} from {low} to {high}",
        )
        body = loop.format(a=low, b=high)
    return one("code", question, f"```{fence}\n{body}\n```", f"A small program in {language}.")
