"""Rules on ranks, degrees, batches and sequences."""

from __future__ import annotations

from sweeps.plan.rules.base import Draft, choices, divisors, rule

BYTE_VALUES = 256


@rule(source="nvidia-smi, or the cores this process may use")
def ranks_fit_the_cluster(draft: Draft) -> str | None:
    """Each rank needs a GPU, or a core, of its own."""
    machine = draft.machine
    if draft.ranks <= machine.capacity:
        return None
    unit = "GPUs" if machine.device == "cuda" else "cores"
    nodes = machine.nodes_of_a_trial or machine.nodes
    return (
        f"ranks={draft.ranks} is more than the capacity of {machine.capacity} "
        f"({nodes} x {machine.ranks_per_node} {unit}); ranks may be 1 to {machine.capacity}"
    )


@rule(source="ranks = tensor x pipeline x data")
def degrees_divide_ranks(draft: Draft) -> str | None:
    """Every model copy has tensor x pipeline ranks."""
    degree = draft.config.tensor * draft.config.pipeline
    if draft.ranks % degree == 0:
        return None
    return (
        f"tensor={draft.config.tensor} x pipeline={draft.config.pipeline} does not divide "
        f"ranks={draft.ranks}; their product may be {choices(divisors(draft.ranks))}"
    )


@rule(source="deepspeed/runtime/config.py, _batch_assertion")
def batches_divide(draft: Draft) -> str | None:
    """The batch triad: global_batch = micro_batch x accumulation x data degree."""
    config, data = draft.config, draft.data
    if ranks_fit_the_cluster(draft) or degrees_divide_ranks(draft):
        return None  # there is no valid data degree
    if config.global_batch % (config.micro_batch * data) == 0:
        return None
    if config.global_batch % data:
        near = max(data, round(config.global_batch / data) * data)
        way_out = f"no micro_batch is legal; global_batch must be a multiple of {data}, such as {near}"
    else:
        way_out = f"micro_batch may be {choices(divisors(config.global_batch // data))}"
    return (
        f"global_batch={config.global_batch} is not a multiple of micro_batch={config.micro_batch} "
        f"x data degree {data}; {way_out}"
    )


@rule(source="transformers: max_position_embeddings")
def sequence_fits_the_model(draft: Draft) -> str | None:
    """The model is not made for positions beyond its own maximum."""
    if draft.config.seq_len <= draft.model.positions:
        return None
    model = draft.model
    return f"seq_len={draft.config.seq_len} is longer than the {model.positions} positions of {model.name}"


@rule(source="an embedding has no row for other tokens")
def bytes_fit_the_vocabulary(draft: Draft) -> str | None:
    """Without a tokenizer, each byte is a token."""
    data = draft.config.data
    if data.kind == "synthetic" or data.tokenizer or draft.model.vocab >= BYTE_VALUES:
        return None
    return (
        f"a vocabulary of {draft.model.vocab} cannot hold {BYTE_VALUES} byte values; "
        f"set model.vocab to {BYTE_VALUES} or more, or data.tokenizer"
    )


RULES = (
    ranks_fit_the_cluster,
    degrees_divide_ranks,
    batches_divide,
    sequence_fits_the_model,
    bytes_fit_the_vocabulary,
)
