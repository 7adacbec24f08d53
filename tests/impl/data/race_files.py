"""Questions written as RACE has them: a file for each passage; or as the hub has its copies."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from impl.data.race import LETTERS, PARTS, Question

QUESTIONS = {
    part: [
        Question(f"A {part} passage. It rains.", "What does it do?", ("rain", "snow", "shine", "blow"), 0, "middle"),
        Question(f"A {part} passage. It rains.", "It _ .", ("snows", "rains", "shines", "blows"), 1, "middle"),
        Question(f"Another {part} passage.", "The passage is _ , ça va.", ("a", "b", "c", "d"), 3, "high"),
    ]
    for part in PARTS
}


def write_race(folder: Path, questions: Mapping[str, Sequence[Question]] = QUESTIONS) -> Path:
    """RACE's own layout."""
    for part, some in questions.items():
        for number, article in enumerate(dict.fromkeys(one.article for one in some)):
            of_one = [one for one in some if one.article == article]
            path = folder / part / of_one[0].level / f"{number}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            content = {
                "article": article,
                "id": f"{of_one[0].level}{number}.txt",
                "questions": [one.question for one in of_one],
                "options": [list(one.options) for one in of_one],
                "answers": [LETTERS[one.answer] for one in of_one],
            }
            path.write_text(json.dumps(content))
    return folder


def write_hub(folder: Path, questions: Mapping[str, Sequence[Question]] = QUESTIONS) -> Path:
    """A row a question, as the hub's copies have them, in files that `datasets` reads from a folder."""
    folder.mkdir(parents=True)
    for part, some in questions.items():
        rows = [
            {
                "example_id": f"{one.level}{number}.txt",
                "article": one.article,
                "question": one.question,
                "options": list(one.options),
                "answer": LETTERS[one.answer],
            }
            for number, one in enumerate(some)
        ]
        name = {"dev": "validation"}.get(part, part)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
