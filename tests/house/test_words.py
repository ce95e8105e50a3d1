"""What a bit means is known to codecs, the format and the operators: elsewhere their words do not occur.

``packed``, ``absmax`` and ``codebook`` are parts of one codec. Code that says them knows how a weight is coded, and
would have to be read again for the next codec. The files below still say them, so many times. The numbers may only
become smaller; a file at 0 leaves the table.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# `for_packed` is a function for whole layers, `packed_modules_mapping` what servers call fused ones. kbitq/formats has
# the names of other tools.
MAY_SAY = ("kbitq/codecs/", "kbitq/format/", "kbitq/ops/", "kbitq/functional/", "kbitq/formats/", "kbitq/_C.pyi")
WORD = re.compile(
    r"(?<!for_)packed(?!_names|_parameters|_like|_class|_with|_modules_mapping)|absmax(?!\")|codebook(?!\w*_name|s?\.levels)"
)

STILL: dict[str, int] = {
    "kbitq/_moved.py": 2,
    "kbitq/card/card.py": 1,
    "kbitq/card/command.py": 3,
    "kbitq/checkpoint/load_save.py": 1,
    "kbitq/checkpoint/passes/ledger.py": 12,
    "kbitq/checkpoint/passes/levels.py": 2,
    "kbitq/checkpoint/passes/measure.py": 2,
    "kbitq/checkpoint/passes/resume.py": 4,
    "kbitq/checkpoint/plan/options.py": 1,
    "kbitq/checkpoint/plan/plan.py": 9,
    "kbitq/checkpoint/plan/recipe.py": 1,
    "kbitq/checkpoint/plan/tensor_plan.py": 3,
    "kbitq/checkpoint/plan/totals.py": 4,
    "kbitq/checkpoint/source/recognise.py": 2,
    "kbitq/checkpoint/written/stored.py": 3,
    "kbitq/choose/recipe.py": 7,
    "kbitq/choose/selection.py": 3,
    "kbitq/integrations/peft.py": 3,
    "kbitq/integrations/transformers/config.py": 9,
    "kbitq/integrations/transformers/manifest.py": 2,
    "kbitq/integrations/transformers/on_the_fly.py": 2,
    "kbitq/integrations/transformers/packed_model.py": 5,
    "kbitq/integrations/transformers/quantizer.py": 6,
    "kbitq/integrations/transformers/routes.py": 1,
    "kbitq/integrations/transformers/saving.py": 1,
    "kbitq/nn/embedding.py": 2,
    "kbitq/nn/experts.py": 1,
    "kbitq/nn/linear.py": 2,
    "kbitq/nn/packed.py": 9,
    "kbitq/nn/replace.py": 3,
    "kbitq/on_the_fly/decisions.py": 2,
    "kbitq/on_the_fly/options.py": 2,
    "kbitq/quantized.py": 7,
    "kbitq/report/difference.py": 3,
    "kbitq/report/expected.py": 2,
    "kbitq/report/facts.py": 2,
    "kbitq/report/html.py": 1,
    "kbitq/report/side.py": 2,
    "kbitq/report/usage.py": 10,
}


def words_in(text: str) -> int:
    """How often code says a part's name; comments and docstrings may."""
    import io
    import tokenize

    found, statement_start = 0, True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING and statement_start:
            continue  # a docstring
        if token.type in (tokenize.NAME, tokenize.STRING) or token.type == getattr(tokenize, "FSTRING_MIDDLE", -1):
            found += len(WORD.findall(token.string))
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            statement_start = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
    return found


def said() -> dict[str, int]:
    files = [p for p in sorted(ROOT.glob("kbitq/**/*.py")) if not p.relative_to(ROOT).as_posix().startswith(MAY_SAY)]
    counts = {p.relative_to(ROOT).as_posix(): words_in(p.read_text()) for p in files}
    return {file: count for file, count in counts.items() if count}


def test_only_codecs_know_the_parts() -> None:
    now = said()
    more = {file: (STILL.get(file, 0), count) for file, count in now.items() if count > STILL.get(file, 0)}
    assert more == {}, "(allowed, found): ask the codec instead"
    less = {file: (count, now.get(file, 0)) for file, count in STILL.items() if count > now.get(file, 0)}
    assert less == {}, "(allowed, found): well done; write the smaller number into STILL"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("x = q.packed\n", 1),
        ('"""packed and absmax"""\n# codebook\n', 0),
        ('name = "weight_packed"\n', 1),
        ("def f():\n    '''The codebook.'''\n    return absmax\n", 1),
    ],
)
def test_words_are_counted(text: str, count: int) -> None:
    assert words_in(text) == count
