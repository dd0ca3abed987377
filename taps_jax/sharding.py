"""The device mesh, and one table that says how each parameter is laid out on it.

One device is a 1x1 mesh; there is no second code path.
"""

import re

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from taps_jax.errors import InputError

DATA, TENSOR = "data", "tensor"

# Verifier parameters that the tensor axis splits: outputs of the first product of a block, inputs of the second, so
# that a block needs one sum over devices. Everything else, and every drafter parameter, is replicated.
_VERIFIER_RULES = (
    (r"(q|k|v|gate|up)_proj\.(weight|bias)$", PartitionSpec(TENSOR)),
    (r"(o|down)_proj\.weight$", PartitionSpec(None, TENSOR)),
    (r"(embed_tokens|lm_head)\.weight$", PartitionSpec(TENSOR)),
)


def make_mesh(data: int, tensor: int) -> Mesh:
    """A mesh of `data` x `tensor` devices; `data` 0 takes all devices that `tensor` leaves.

    Raises:
      InputError: there are not that many devices.
    """
    devices = jax.device_count()
    data = data or devices // tensor
    if data < 1 or tensor < 1 or data * tensor > devices:
        raise InputError(f"a mesh of {data} x {tensor} needs {max(1, data) * tensor} devices, found {devices}")
    axis_types = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((data, tensor), (DATA, TENSOR), axis_types, devices=jax.devices()[: data * tensor])


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def rows_over_data(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """Axis `axis` of an array is split over the data axis of the mesh."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, DATA))


def verifier_shardings(mesh: Mesh, params: dict) -> dict:
    """A sharding per verifier parameter; axes that the tensor axis does not divide stay whole."""

    def choose(path, leaf) -> NamedSharding:
        name = ".".join(key.key for key in path)
        for pattern, spec in _VERIFIER_RULES:
            if re.search(pattern, name):
                split = next(axis for axis, part in enumerate(spec) if part)
                if leaf.shape[split] % mesh.shape[TENSOR] == 0:
                    return NamedSharding(mesh, spec)
        return replicated(mesh)

    return jax.tree.map_with_path(choose, params)
