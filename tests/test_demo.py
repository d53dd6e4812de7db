"""The demo's parts: its text, its plain reference, its samples; and the whole of it, small."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe import cli
from jaxpipe.demo import program
from jaxpipe.demo.data import Corpus
from jaxpipe.demo.model import Decoder, loss_of, optimizer
from jaxpipe.demo.plain import PlainState, loss_and_grads, plain_step
from jaxpipe.demo.sampling import sample
from jaxpipe.schedule_source import build, read_source

MODEL = Decoder(layers=4, width=16, heads=2, context=12)
TEXT = bytes(range(97, 123)) * 40


@pytest.fixture(scope="module")
def params():
    return MODEL.init(jax.random.key(0), jnp.zeros((1, 12), jnp.int32))


@pytest.fixture(scope="module")
def corpus():
    return Corpus.from_bytes(TEXT, name="the alphabet")


def test_standard_library_is_split_the_same_each_time_and_shares_no_file():
    first, second = (Corpus.standard_library(limit=2_000_000) for _ in range(2))
    assert np.array_equal(first.train, second.train)
    assert np.array_equal(first.held_out, second.held_out)
    assert 1_000_000 < len(first.train) + len(first.held_out) <= 2_000_000
    assert b"import " in first.held_out.tobytes()
    assert first.held_out.tobytes()[:2000] not in first.train.tobytes()


def test_targets_are_inputs_one_byte_later(corpus):
    batches = [corpus.training_batch(0, size=3, context=12, seed=0)]
    batches += corpus.held_out_batches(2, size=3, context=12)
    for batch in batches:
        assert batch["inputs"].shape == batch["targets"].shape == (3, 12)
        assert np.array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])


def test_training_batches_depend_on_seed_and_step_alone(corpus):
    draw = partial(corpus.training_batch, size=4, context=12)
    assert np.array_equal(draw(3, seed=1)["inputs"], draw(3, seed=1)["inputs"])
    assert not np.array_equal(draw(3, seed=1)["inputs"], draw(4, seed=1)["inputs"])
    assert not np.array_equal(draw(3, seed=1)["inputs"], draw(3, seed=2)["inputs"])


def test_windows_reach_the_last_byte_of_the_text():
    short = Corpus.from_bytes(b"0123456789" * 13, name="digits")
    short.check_context(12)
    batch = short.held_out_batches(1, size=1, context=12)[0]
    assert batch["targets"][0].tobytes() == short.held_out[1:].astype(np.int32).tobytes()


def test_decoder_sees_no_byte_ahead(params):
    tokens = jnp.asarray(np.frombuffer(TEXT[:12], np.uint8).astype(np.int32))[None]
    changed = tokens.at[0, 7].set(0)
    before, after = (MODEL.apply(params, t)[0] for t in (tokens, changed))
    assert np.array_equal(before[:7], after[:7])
    assert not np.array_equal(before[7], after[7])


def test_plain_gradients_equal_those_of_the_whole_batch(params, corpus):
    batch = corpus.training_batch(0, size=4, context=12, seed=0)
    loss = partial(loss_of, MODEL)
    whole = jax.jit(jax.value_and_grad(loss))(params, batch)
    summed = jax.jit(partial(loss_and_grads, loss, microbatches=4))(params, batch)
    for ours, theirs in zip(jax.tree.leaves(summed), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_plain_training_learns_the_alphabet_and_samples_continue_it(params, corpus):
    steps = 150
    adamw = optimizer(steps, learning_rate=1e-2)
    step = plain_step(partial(loss_of, MODEL), adamw, microbatches=2)
    state = PlainState(jax.tree.map(jnp.copy, params), adamw.init(params))
    for number in range(steps):
        state, loss = step(state, corpus.training_batch(number, size=8, context=12, seed=0))
    assert loss < 0.5
    text = sample(MODEL, state.params, b"hijk", length=30, temperature=0, seed=0)
    assert text.startswith(b"lmnop") and len(text) == 30


def test_samples_of_a_seed_are_the_same(params):
    draw = partial(sample, MODEL, params, b"a", length=20)
    assert draw(temperature=1.0, seed=1) == draw(temperature=1.0, seed=1)
    assert draw(temperature=1.0, seed=1) != draw(temperature=1.0, seed=2)
    assert draw(temperature=0.0, seed=1) == draw(temperature=0.0, seed=2)


OWN = """
import jaxpipe as jp
from jaxpipe import B, F

@jp.schedule
def one_at_a_time(device, devices, microbatches):
    for i in range(microbatches):
        yield F(i)
        yield B(i)
"""


@pytest.mark.parametrize(
    "schedule", [pytest.param("1f1b", marks=pytest.mark.smoke), "own.py", "zb_v", "saved.json"]
)
def test_demo_trains_as_the_reference_does(schedule, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_bytes(TEXT)
    Path("own.py").write_text(OWN)
    build(read_source("zb_h1"), called="zb_h1", devices=2, microbatches=4).save("saved.json")
    records = []
    run = program.run
    monkeypatch.setattr(program, "run", lambda *args: records.append(run(*args)))
    flags = ["--devices=2", "--microbatches=4", "--steps=6", "--layers=4", "--width=16"]
    flags += ["--batch=4", "--context=12", "--text=text.txt", f"--schedule={schedule}"]
    assert cli.main(cli.parser().parse_args(["demo", *flags])) == 0

    (record,) = records
    assert len(record.losses) == len(record.plain_losses) == 6
    np.testing.assert_allclose(record.losses, record.plain_losses, rtol=1e-4)
    said = capsys.readouterr().out
    held_out = re.search(r"held-out loss \(nats per byte\)\s+(\S+)\s+(\S+)", said)
    assert held_out and abs(float(held_out[1]) - float(held_out[2])) < 1e-3
    for words in ("step    6/6", "device 1", "median step", "a sample:", "jaxpipe_demo.svg"):
        assert words in said, said
    assert "<svg" in Path("jaxpipe_demo.svg").read_text()
