"""Laws of `Pipelined.init`: plain init's values, each leaf computed on its own device alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxpipe as jp
from jaxpipe.demo.model import Decoder, loss_of
from tests.meshes import pipe_mesh

BATCH = {
    "inputs": jax.ShapeDtypeStruct((4, 8), jnp.int32),
    "targets": jax.ShapeDtypeStruct((4, 8), jnp.int32),
}


def decoder(devices: int, schedule: str = "1f1b"):
    model = Decoder(layers=4, width=16, heads=2, context=8)
    loss = jp.pipeline(
        lambda params, batch: loss_of(model, params, batch),
        schedule=schedule,
        microbatches=2,
        mesh=pipe_mesh(devices),
    )
    tokens = jnp.zeros((1, 8), jnp.int32)
    return loss, lambda key: model.init(key, tokens)


@pytest.mark.parametrize("devices", [*(pytest.param(d, marks=pytest.mark.slow) for d in (1, 2)), 4])
def test_init_equals_plain_init_bitwise(devices):
    loss, init = decoder(devices)
    loss.lower(jax.eval_shape(init, jax.random.key(0)), BATCH)
    made = loss.init(init, jax.random.key(7))
    plain = jax.jit(init)(jax.random.key(7))
    assert jax.tree.structure(made) == jax.tree.structure(plain)
    for (path, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(made), jax.tree.leaves(plain), strict=True
    ):
        assert ours.aval == theirs.aval, path
        assert np.array_equal(ours, theirs), path


def test_init_leaves_are_placed_as_place_places_them():
    loss, init = decoder(4)
    plain = init(jax.random.key(0))
    placed = loss.place(plain, BATCH)
    made = loss.init(init, jax.random.key(0))
    for ours, theirs in zip(jax.tree.leaves(made), jax.tree.leaves(placed), strict=True):
        assert ours.sharding == theirs.sharding


def test_no_device_computes_a_leaf_of_another():
    """What a device makes is its own leaves: together the devices make the model once."""
    loss, init = decoder(4)
    shapes = jax.eval_shape(init, jax.random.key(0))
    loss.lower(shapes, BATCH)
    before = {id(a) for a in jax.live_arrays()}
    made = loss.init(init, jax.random.key(0))
    new = [a for a in jax.live_arrays() if id(a) not in before]
    assert sum(a.nbytes for a in new) == sum(a.nbytes for a in jax.tree.leaves(made))


def test_a_tied_leaf_is_equal_on_all_its_devices():
    class Tied(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(32, 8)
            x = jp.stage_boundary(embed(tokens))
            return embed.attend(nn.Dense(8)(x))

    model = Tied()

    @jp.pipeline(schedule="gpipe", microbatches=2, mesh=pipe_mesh(2))
    def loss(params, tokens):
        return model.apply(params, tokens).mean()

    def init(key):
        return model.init(key, jnp.zeros((1, 4), jnp.int32))

    loss.lower(jax.eval_shape(init, jax.random.key(0)), jnp.zeros((4, 4), jnp.int32))
    made = loss.init(init, jax.random.key(3))
    table = made["params"]["Embed_0"]["embedding"]
    assert len(table.sharding.device_set) == 2
    plain = jax.jit(init)(jax.random.key(3))["params"]["Embed_0"]["embedding"]
    for shard in table.addressable_shards:
        assert np.array_equal(shard.data, plain)


def test_init_of_another_tree_is_refused():
    loss, init = decoder(2)
    loss.lower(jax.eval_shape(init, jax.random.key(0)), BATCH)
    with pytest.raises(jp.PipelineError, match=r"missing .*block_0.*not among them .*embed"):
        loss.init(lambda key: {"params": {"embed": jnp.ones(3)}}, jax.random.key(0))


def test_init_before_tracing_says_what_to_call():
    loss, init = decoder(2)
    with pytest.raises(jp.PipelineError, match=r"\.lower\(params, batch\)"):
        loss.init(init, jax.random.key(0))
