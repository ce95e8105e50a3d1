"""Rules on the command line and recipes in TOML: what they mean, what is refused, and a round trip."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbitq.choose.recipe import exactly, load_recipe, parse_rule, recipe_text, rule_text
from kbitq.choose.selection import Rule, TensorRule
from kbitq.choose.tensor_names import layer_of, role_of, short_roles, tie_of
from kbitq.errors import SelectionError


@pytest.mark.parametrize(
    "text, rule",
    [
        ("*.mlp.*=k4", TensorRule("*.mlp.*", k=4)),
        ("*.bias=keep", TensorRule("*.bias", keep=True)),
        ("a=k2,scale=absmax,codebook=nf", TensorRule("a", k=2, scale="absmax", codebook="nf")),
        ("a=codebook=my levels.json", TensorRule("a", codebook="my levels.json")),
        ("re:layers\\.(0|1)=k8", TensorRule("re:layers\\.(0|1)", k=8)),
        ("re:(?=x)a{1,2}=k3", TensorRule("re:(?=x)a{1,2}", k=3)),
        ("odd=name=k3", TensorRule("odd=name", k=3)),
    ],
)
def test_rules_of_the_command_line(text, rule):
    assert parse_rule(text) == rule
    assert rule_text(rule) == text


@pytest.mark.parametrize(
    "text, message",
    [
        ("*.mlp.*", "not understood"),
        ("=k4", "not understood"),
        ("a=4", "not understood"),
        ("a=k4,bogus", "not understood"),
        ("a=k4,k5", "sets k twice"),
        ("a=k9", "outside 1..8"),
        ("a=scale=best", "scale must be absmax or mse"),
        ("a=keep,k4", "takes no K"),
    ],
)
def test_rules_that_are_refused(text, message):
    with pytest.raises(SelectionError, match=message):
        parse_rule(text)


def test_a_recipe_from_a_file(tmp_path: Path):
    path = tmp_path / "recipe.toml"
    path.write_text(
        'k = 3\ncodebook = "fit"\nexclude = ["*x*"]\nkeep_embeddings = false\n'
        "[[rule]]\nmatch = \"*.down_proj.weight\"\nk = 4\n[[rule]]\nmatch = 're:layers\\.0\\.'\nkeep = true\n"
    )
    recipe = load_recipe(path)
    assert recipe.options == {"k": 3, "codebook": "fit", "exclude": ("*x*",), "keep_embeddings": False}
    assert recipe.rules == (TensorRule("*.down_proj.weight", k=4), TensorRule("re:layers\\.0\\.", keep=True))
    assert recipe.importance is None


@pytest.mark.parametrize(
    "text, message",
    [
        ("k = ", "not a TOML file"),
        ("bits = 3", "'bits' is not known"),
        ("k = true", "k must be a whole number"),
        ('k = "3"', "k must be a whole number"),
        ("include = 'a'", "include must be a list of texts"),
        ("include = [1]", "include must be a list of texts"),
        ("rule = 3", "tables"),
        ("[[rule]]\nk = 3", r"rule 1 has no 'match'"),
        ("[[rule]]\nmatch = 'a'\n[[rule]]\nmatch = 'b'\nbits = 3", r"rule 2: 'bits' is not known"),
        ("[[rule]]\nmatch = 'a'\nk = 12", "outside 1..8"),
    ],
)
def test_recipes_that_are_refused(tmp_path: Path, text, message):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(SelectionError, match=message) as raised:
        load_recipe(path)
    assert "recipe.toml" in str(raised.value) or "rule 'a'" in str(raised.value)


def test_a_recipe_that_is_not_there(tmp_path: Path):
    with pytest.raises(SelectionError, match="cannot be read"):
        load_recipe(tmp_path / "absent.toml")


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
rules = st.builds(
    TensorRule, text, k=st.none() | st.integers(2, 8), scale=st.sampled_from([None, "mse"]), codebook=st.none() | text
)


@given(st.lists(rules, max_size=4), st.lists(text, max_size=3), st.booleans())
def test_what_is_written_is_read_again(tmp_path_factory, given_rules, patterns, keep):
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(recipe_text({"include": tuple(patterns), "keep_embeddings": keep, "k": None}, given_rules), "utf-8")
    recipe = load_recipe(path)
    assert list(recipe.rules) == given_rules
    assert recipe.options.get("include", ()) == tuple(patterns)
    assert recipe.options["keep_embeddings"] is keep


@given(text, text)
def test_an_exact_pattern_matches_its_name_only(name, other):
    assert Rule(exactly(name)).matches(name)
    assert Rule(exactly(name)).matches(other) == (other == name)


@pytest.mark.parametrize(
    "names",
    [
        ["l.3.attn.q_proj.weight", "l.3.attn.k_proj.weight", "l.3.attn.v_proj.weight"],
        ["encoder.layer.0.attention.self.query.weight", "encoder.layer.0.attention.self.value.weight"],
        ["l.3.mlp.gate_proj.weight", "l.3.mlp.up_proj.weight"],
        ["l.3.mlp.experts.0.up_proj.weight", "l.3.mlp.experts.11.down_proj.weight", "l.3.mlp.experts.gate_up_proj"],
        ["l.3.feed_forward.w1.weight", "l.3.feed_forward.w3.weight"],
    ],
)
def test_what_engines_fuse(names):
    assert len({tie_of(name) for name in names}) == 1
    assert tie_of(names[0]) != tie_of(names[0].replace(".3.", ".4.").replace(".0.", ".1."))


def test_what_engines_do_not_fuse():
    alone = ["l.3.attn.o_proj.weight", "l.3.attn.q_proj.weight", "l.3.mlp.down_proj.weight", "l.3.mlp.up_proj.weight"]
    assert len({tie_of(name) for name in alone}) == 4


def test_layers_and_roles():
    assert layer_of("model.layers.12.mlp.experts.3.up_proj.weight") == 12
    assert layer_of("lm_head.weight") is None
    assert role_of("model.layers.12.mlp.experts.3.up_proj.weight") == "model.layers.*.mlp.experts.*.up_proj.weight"
    roles = ["l.*.self_attn.q_proj.weight", "l.*.mlp.experts.*.up_proj.weight", "a.mlp.up.weight", "b.mlp.up.weight"]
    assert list(short_roles(roles).values()) == ["self_attn.q_proj", "experts.up_proj", "a.mlp.up", "b.mlp.up"]
