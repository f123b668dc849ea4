"""The seeded faults by name: what each does, the row of the public catalogue of faults that it stands for, its gate.

A fault's gate is the first gate in the order of the study that must object: those before it stay green. Rows that no
tensor here can show are in :data:`NOT_EXPRESSIBLE`. ``docs/faults.md`` is this module as a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

GATES = ("identity", "dispatch", "stale-maps", "routing", "shifted-outputs", "placement", "replay", "determinism")
"""The gates that claim faults, in the order of the study."""

BOTH, LIVE, TRANSFER = ("live", "transfer"), ("live",), ("transfer",)

LIVE_PASSES: Mapping[str, str] = MappingProxyType(
    {
        "probe": "the shortest prompts with fingerprints for K, V and queries; cells are filled where replay claims it",
        "model": "the shortest prompts with the model's own K, V and queries, whose attention is diffuse",
        "pressure": "as probe, with all but the last blocks of the pool held: requests lie at its top",
        "whole": "the whole panel with fingerprints: its longest prompt is computed in chunks",
    }
)
"""The passes over the served arm's oracle panel that a live fault may need, and what each is."""

_ROOM = "pytest_kvqual.faults."


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One seeded fault.

    Args:
        name: Its name in reports.
        rows: Rows of the catalogue of public reports whose mechanism it has.
        claimed_by: The first gate that must object; of a benign one the gate that would be the first to cry wolf.
        plant: ``module:function``, called as ``function(worker)``: live through the worker's RPC or from an arm's
            ``after_init``, and on a transfer engine. It undoes itself through ``worker.kvqual_undo``.
        mechanism: What the code then does wrong.
        exposed_by: Which condition of the workload shows it.
        where: ``live`` (in the engine's worker), ``transfer`` (on an engine without a model).
        scenario: The scenario of :mod:`pytest_kvqual.faults.scenarios` that has the condition.
        live_pass: The pass of :data:`LIVE_PASSES` that has it in a served arm. Identity, dispatch and determinism have
            readings of their own, and a fault that they claim needs none.
        needs: What a live arm must have: ``scales`` (declared V scales), ``ours`` (a backend that takes any lengths;
            the stock CPU kernel has a work schedule made from the true ones), or nothing.
        finding: The one kind of finding that it makes; an arm for which the study waives that kind cannot show it.
        benign: No fault: every gate must stay green.
    """

    name: str
    claimed_by: str
    plant: str
    mechanism: str
    exposed_by: str
    rows: tuple[str, ...] = ()
    where: tuple[str, ...] = BOTH
    scenario: str = "plain"
    live_pass: str = "probe"
    needs: str = ""
    finding: str = ""
    benign: bool = False


_ALL = (
    # identity
    Fault(
        name="weights-altered",
        rows=(),
        claimed_by="identity",
        plant=_ROOM + "identity:weights_altered",
        mechanism="one element of one norm weight of the loaded model is changed",
        exposed_by="any digest taken after the load",
        where=LIVE,
    ),
    Fault(
        name="packed-weights-altered",
        rows=(),
        claimed_by="identity",
        plant=_ROOM + "identity:packed_weights_altered",
        mechanism=(
            "one projection multiplies with a weight of which one element is changed; the parameter itself is untouched"
        ),
        exposed_by="a weight read back through its kernel",
        where=LIVE,
    ),
    Fault(
        name="scale-copy-altered",
        rows=("P1-03",),
        claimed_by="identity",
        plant=_ROOM + "identity:scale_copy_altered",
        mechanism="one layer's V scale differs between the copy that writes and the copy that reads",
        exposed_by="every copy compared, not one",
        scenario="eight",
        needs="scales",
    ),
    Fault(
        name="scales-left-at-one",
        rows=("P1-03",),
        claimed_by="identity",
        plant=_ROOM + "identity:scales_left_at_one",
        mechanism="no layer was given its scales: every copy of both is 1, so that writes and reads agree",
        exposed_by="scales compared with the declared ones: writes and reads agree",
        scenario="eight",
        needs="scales",
    ),
    # dispatch
    Fault(
        name="layer-served-by-another-kernel",
        rows=(),
        claimed_by="dispatch",
        plant=_ROOM + "dispatch:layer_served_by_another_kernel",
        mechanism="the last layer is served by another implementation, which is right",
        exposed_by="kernels of every layer",
    ),
    Fault(
        name="layer-falls-back-after-calls",
        rows=(),
        claimed_by="dispatch",
        plant=_ROOM + "dispatch:layer_falls_back_after_calls",
        mechanism="the last layer is served by another implementation from its fifth call on",
        exposed_by="kernels read again after each capture",
    ),
    Fault(
        name="layer-has-another-implementation-class",
        rows=(),
        claimed_by="dispatch",
        plant=_ROOM + "dispatch:layer_has_another_implementation_class",
        mechanism="the implementation of the last layer is of another class, which does the same",
        exposed_by="every layer's class, not the first's",
    ),
    # stale-maps
    Fault(
        name="stale-block-table",
        rows=("P1-30", "P1-39"),
        claimed_by="stale-maps",
        plant=_ROOM + "metadata:stale_block_table",
        mechanism="attention metadata carries the block table of the previous step",
        exposed_by="a batch that changes, or a request that gets a block while decoding",
    ),
    Fault(
        name="captured-table-never-refreshed",
        rows=("P1-30",),
        claimed_by="stale-maps",
        plant=_ROOM + "metadata:captured_table_never_refreshed",
        mechanism=(
            "the table of the first step stays in the buffer that a captured graph reads; later ones go elsewhere"
        ),
        exposed_by="a second step with another table",
    ),
    Fault(
        name="stale-lengths",
        rows=("P1-30", "P1-33"),
        claimed_by="stale-maps",
        plant=_ROOM + "metadata:stale_lengths",
        mechanism="attention metadata carries the sequence lengths of the previous step",
        exposed_by="any second step of a request",
        needs="ours",
    ),
    Fault(
        name="stale-row-starts",
        rows=("P1-33", "P1-39"),
        claimed_by="stale-maps",
        plant=_ROOM + "metadata:stale_row_starts",
        mechanism=(
            "the first two requests' row starts are those of the previous step, as far as the batch still holds them"
        ),
        exposed_by="two steps with different row counts",
        where=TRANSFER,
    ),
    Fault(
        name="rows-swapped-through-views",
        rows=("P1-84",),
        claimed_by="stale-maps",
        plant=_ROOM + "metadata:rows_swapped_through_views",
        mechanism=(
            "two rows of a reordered table are swapped back through views of one buffer: both end as the second"
        ),
        exposed_by="two requests with different blocks",
    ),
    Fault(
        name="lengths-advanced-by-draft",
        rows=("P1-93",),
        claimed_by="stale-maps",
        plant=_ROOM + "metadata:lengths_advanced_by_draft",
        mechanism=(
            "every row is advanced by the full length of a draft of two, however many of its tokens were accepted"
        ),
        exposed_by="any step",
        where=TRANSFER,
    ),
    Fault(
        name="table-row-recycled-mid-step",
        rows=("P1-79",),
        claimed_by="stale-maps",
        plant=_ROOM + "metadata:table_row_recycled_mid_step",
        mechanism=(
            "the row of a request is given to another after the first layer has read it: later layers read the new one"
        ),
        exposed_by="two requests and two layers",
    ),
    Fault(
        name="runner-rows-swapped-through-views",
        rows=("P1-84",),
        claimed_by="stale-maps",
        plant=_ROOM + "lifetime:runner_rows_swapped_through_views",
        mechanism="a reorder exchanges two table rows through views of one buffer: both end as the second",
        exposed_by="a reorder of the persistent batch",
        where=TRANSFER,
    ),
    Fault(
        name="maps-of-the-next-step",
        rows=("P1-39",),
        claimed_by="stale-maps",
        plant=_ROOM + "lifetime:maps_of_the_next_step",
        mechanism=(
            "one pinned buffer serves all steps, and the host writes the next step's maps before the device has read it"
        ),
        exposed_by="a host that runs ahead",
        where=TRANSFER,
    ),
    Fault(
        name="replay-keeps-captured-table",
        rows=("P1-30",),
        claimed_by="stale-maps",
        plant=_ROOM + "lifetime:replay_keeps_captured_table",
        mechanism="a replay reads the table that was in the buffer at capture: the new one is in a fresh tensor",
        exposed_by="a second replay with other blocks",
        where=TRANSFER,
        scenario="static",
    ),
    Fault(
        name="replay-keeps-captured-lengths",
        rows=("P1-30", "P1-31", "P1-39"),
        claimed_by="stale-maps",
        plant=_ROOM + "lifetime:replay_keeps_captured_lengths",
        mechanism=(
            "a replay reads the lengths of the step before: the copy into the buffer was queued behind the launch"
        ),
        exposed_by="a second replay with other lengths",
        where=TRANSFER,
        scenario="static",
    ),
    Fault(
        name="all-drafts-counted",
        rows=("P1-93",),
        claimed_by="stale-maps",
        plant=_ROOM + "lifetime:all_drafts_counted",
        mechanism="every request advances by all of its drafts, however many were accepted",
        exposed_by="requests of one batch that accept different counts",
        where=TRANSFER,
        scenario="drafts",
    ),
    Fault(
        name="last-draft-never-rolled-back",
        rows=("P1-94",),
        claimed_by="stale-maps",
        plant=_ROOM + "lifetime:last_draft_never_rolled_back",
        mechanism="when only the last draft was rejected, nothing is rolled back",
        exposed_by="a step in which only the last draft is rejected",
        where=TRANSFER,
        scenario="drafts",
    ),
    Fault(
        name="resumed-without-last-tokens",
        rows=("P1-92",),
        claimed_by="stale-maps",
        plant=_ROOM + "lifetime:resumed_without_last_tokens",
        mechanism=("after a preemption the runner is told a request's tokens without the last ones that were sampled"),
        exposed_by="a resume after a preemption, tokens compared with those fed",
        where=TRANSFER,
    ),
    Fault(
        name="window-block-taken-back-early",
        rows=("P1-78",),
        claimed_by="stale-maps",
        plant=_ROOM + "lifetime:window_block_taken_back_early",
        mechanism=(
            "pruning counts the positions of the step in flight as done: the oldest block in the window loses its entry"
        ),
        exposed_by="a length that is a block multiple, beyond the window",
        where=TRANSFER,
        scenario="window",
    ),
    Fault(
        name="rows-mapped-before-reorder",
        rows=("P1-87",),
        claimed_by="stale-maps",
        plant=_ROOM + "order:rows_mapped_before_reorder",
        mechanism="the probe maps rows to requests before the runner reorders them",
        exposed_by="a batch that the runner reorders",
        where=TRANSFER,
        scenario="decode-first",
    ),
    # routing
    Fault(
        name="slot-off-by-one",
        rows=("P1-17",),
        claimed_by="routing",
        plant=_ROOM + "routing:slot_off_by_one",
        mechanism="every write goes one slot too far",
        exposed_by="any write",
    ),
    Fault(
        name="slot-wrong-at-block-multiple",
        rows=("P1-17", "P1-27"),
        claimed_by="routing",
        plant=_ROOM + "routing:slot_wrong_at_block_multiple",
        mechanism="the write of a position that starts a block goes to the slot before it",
        exposed_by="lengths that cross a block multiple",
    ),
    Fault(
        name="key-value-swapped",
        rows=("P1-06",),
        claimed_by="routing",
        plant=_ROOM + "routing:key_value_swapped",
        mechanism="the cache update takes K for V and V for K",
        exposed_by="K and V cells compared apart",
    ),
    Fault(
        name="last-row-not-written",
        rows=("P1-44",),
        claimed_by="routing",
        plant=_ROOM + "routing:last_row_not_written",
        mechanism="the last row of a step is not written",
        exposed_by="every row's cells compared",
    ),
    Fault(
        name="padding-writes-slot-zero",
        rows=("P1-35",),
        claimed_by="routing",
        plant=_ROOM + "routing:padding_writes_slot_zero",
        mechanism="a padding row writes its K and V to slot 0",
        exposed_by="cells that nobody owns compared too",
    ),
    Fault(
        name="padding-keeps-last-slots",
        rows=("P1-25", "P1-33"),
        claimed_by="routing",
        plant=_ROOM + "routing:padding_keeps_last_slots",
        mechanism="after the batch shrank, its padding rows still write where the last step's rows wrote",
        exposed_by="a step with padding rows after a larger one",
        where=TRANSFER,
    ),
    Fault(
        name="padding-mapped-to-slot-zero",
        rows=("P1-35",),
        claimed_by="routing",
        plant=_ROOM + "lifetime:padding_mapped_to_slot_zero",
        mechanism="rows behind a captured step's last are mapped to slot 0, which is live",
        exposed_by="fewer rows than the captured step has",
        where=TRANSFER,
        scenario="static",
    ),
    Fault(
        name="padding-rows-keep-last-slots",
        rows=("P1-25", "P1-33", "P1-38"),
        claimed_by="routing",
        plant=_ROOM + "lifetime:padding_rows_keep_last_slots",
        mechanism=(
            "after a shrink only the maps of the live rows are refreshed: slots behind them are the last step's"
        ),
        exposed_by="a replay with fewer rows than the one before",
        where=TRANSFER,
        scenario="static",
    ),
    Fault(
        name="slots-from-manager-block-size",
        rows=("P1-17",),
        claimed_by="routing",
        plant=_ROOM + "routing:slots_from_manager_block_size",
        mechanism="slots are computed with a block twice as large as the one that the reader uses",
        exposed_by="a request longer than the smaller block",
    ),
    Fault(
        name="slots-from-rope-positions",
        rows=("P1-27",),
        claimed_by="routing",
        plant=_ROOM + "routing:slots_from_rope_positions",
        mechanism="slots are computed from rope positions, which run ahead of the sequence index after an image",
        exposed_by="positions behind the span that the two counts differ in",
    ),
    Fault(
        name="continuation-written-through-stale-tail",
        rows=("P1-23",),
        claimed_by="routing",
        plant=_ROOM + "routing:continuation_written_through_stale_tail",
        mechanism=(
            "compaction moved only the filled part of a table row; a chunk's further blocks are those of the "
            "row's last user.  The reader has the right table"
        ),
        exposed_by="a chunk continued in a row whose last user had more blocks",
        where=TRANSFER,
    ),
    Fault(
        name="block-number-wraps-on-write",
        rows=("P1-58",),
        claimed_by="routing",
        plant=_ROOM + "routing:block_number_wraps_on_write",
        mechanism=(
            "the offset of a block is one bit too narrow for the pool: the write of a high block lands in a low one"
        ),
        exposed_by="a request at the top of the pool",
        live_pass="pressure",
    ),
    Fault(
        name="heads-copied-flat",
        rows=("P1-56",),
        claimed_by="routing",
        plant=_ROOM + "routing:heads_copied_flat",
        mechanism=(
            "rows are copied head by head into a block as if a head's rows in the block were as many as those copied"
        ),
        exposed_by="fewer rows than a block holds, and more than one head",
        where=TRANSFER,
    ),
    Fault(
        name="cached-keys-rotated-again",
        rows=("P1-102",),
        claimed_by="routing",
        plant=_ROOM + "routing:cached_keys_rotated_again",
        mechanism="a shift of the context rewrites the cached K of a block in place; nothing says that it may",
        exposed_by="every written cell compared again in each step",
    ),
    Fault(
        name="decode-writes-unscaled",
        rows=("P1-01",),
        claimed_by="routing",
        plant=_ROOM + "scales:decode_writes_unscaled",
        mechanism="rows of requests with one query row are cast without their scales; the read multiplies as ever",
        exposed_by="cells written by decode, scales other than 1",
        scenario="eight",
        needs="scales",
    ),
    Fault(
        name="cast-without-clamp",
        rows=("P1-10",),
        claimed_by="routing",
        plant=_ROOM + "scales:cast_without_clamp",
        mechanism="the cast to E4M3 does not clamp first: what lies beyond 464 becomes the byte of NaN",
        exposed_by="one channel beyond 448 times the scale",
        where=TRANSFER,
        scenario="eight",
    ),
    Fault(
        name="v-inline-scales-swizzled",
        rows=("P1-06",),
        claimed_by="routing",
        plant=_ROOM + "scales:v_inline_scales_swizzled",
        mechanism="the V scales of a block are stored in another order than the reader's; K is right",
        exposed_by="V cells compared apart, scales that vary inside a block",
        where=TRANSFER,
        scenario="inline",
    ),
    Fault(
        name="page-stride-without-scales-on-write",
        rows=("P1-14",),
        claimed_by="routing",
        plant=_ROOM + "scales:page_stride_without_scales_on_write",
        mechanism="the write finds a block as if a page had no bytes for inline scales",
        exposed_by="blocks from the second on",
        where=TRANSFER,
        scenario="inline",
    ),
    Fault(
        name="inline-scales-of-first-layer-on-write",
        rows=("P1-15",),
        claimed_by="routing",
        plant=_ROOM + "scales:inline_scales_of_first_layer_on_write",
        mechanism="every layer writes its inline scales into the first layer's cells",
        exposed_by="two layers",
        where=TRANSFER,
        scenario="inline",
    ),
    Fault(
        name="extra-identity-untagged",
        rows=("P1-63",),
        claimed_by="routing",
        plant=_ROOM + "prefix:extra_identity_untagged",
        mechanism="an adapter and a salt enter the key as bare strings: equal strings are one identity",
        exposed_by="an adapter and a salt of equal strings over equal tokens",
        where=TRANSFER,
        scenario="prefixes",
    ),
    Fault(
        name="identity-by-label",
        rows=("P1-64",),
        claimed_by="routing",
        plant=_ROOM + "prefix:identity_by_label",
        mechanism="the key holds the label of an adapter, which two of them share, instead of its id",
        exposed_by="two adapters of one label over equal tokens",
        where=TRANSFER,
        scenario="prefixes",
    ),
    Fault(
        name="block-hash-truncated",
        rows=("P1-65", "P1-67"),
        claimed_by="routing",
        plant=_ROOM + "prefix:block_hash_truncated",
        mechanism="the key is cut to eight bits",
        exposed_by="two blocks whose keys agree in eight bits, constructed",
        where=TRANSFER,
        scenario="prefixes",
    ),
    Fault(
        name="block-hash-without-parents",
        rows=("P1-66",),
        claimed_by="routing",
        plant=_ROOM + "prefix:block_hash_without_parents",
        mechanism="the key of a block is that of its own tokens: what stands before them is not in it",
        exposed_by="equal tokens behind different ones",
        where=TRANSFER,
        scenario="prefixes",
    ),
    Fault(
        name="hash-match-trusted",
        rows=("P1-67",),
        claimed_by="routing",
        plant=_ROOM + "prefix:hash_match_trusted",
        mechanism="the key does not tell the order of a block's tokens, and tokens are not compared at a match",
        exposed_by="two blocks of the same tokens in another order",
        where=TRANSFER,
        scenario="prefixes",
    ),
    Fault(
        name="recycled-block-keeps-its-hash",
        rows=("P1-69", "P1-73"),
        claimed_by="routing",
        plant=_ROOM + "prefix:recycled_block_keeps_its_hash",
        mechanism="a block that is granted anew stays known as the prefix that it held",
        exposed_by="a prompt again after its blocks were granted to others",
        where=TRANSFER,
        scenario="prefixes",
    ),
    Fault(
        name="longest-match-of-all-groups",
        rows=("P1-70",),
        claimed_by="routing",
        plant=_ROOM + "prefix:longest_match_of_all_groups",
        mechanism=(
            "the cached length is the longest of all groups of layers; full-attention layers never wrote the last block"
        ),
        exposed_by="a prefix hit that is shorter than the prompt",
        where=TRANSFER,
        scenario="prefixes",
    ),
    Fault(
        name="partial-block-copied-double",
        rows=("P1-71",),
        claimed_by="routing",
        plant=_ROOM + "prefix:partial_block_copied_double",
        mechanism=(
            "the copy of a partly filled block moves twice its bytes: the block behind the target is overwritten"
        ),
        exposed_by="cells of every other block compared after a copy",
        where=TRANSFER,
        scenario="prefixes",
    ),
    Fault(
        name="shared-block-freed-by-first-holder",
        rows=("P1-73",),
        claimed_by="routing",
        plant=_ROOM + "prefix:shared_block_freed_by_first_holder",
        mechanism=(
            "the first request that leaves gives a shared block back to the pool; tables and hashes still point to it"
        ),
        exposed_by="a shared prefix whose first holder leaves, then new requests",
        where=TRANSFER,
        scenario="prefixes",
    ),
    Fault(
        name="fork-shares-partial-block",
        rows=("P1-74", "P1-75"),
        claimed_by="routing",
        plant=_ROOM + "prefix:fork_shares_partial_block",
        mechanism=(
            "a fork takes over all blocks of its parent, the partly filled one too, and both go on writing to it"
        ),
        exposed_by="two continuations of one request that differ",
        where=TRANSFER,
        scenario="prefixes",
    ),
    Fault(
        name="fork-copies-table-only",
        rows=("P1-75",),
        claimed_by="routing",
        plant=_ROOM + "prefix:fork_copies_table_only",
        mechanism="a fork gets a block of its own for the partly filled one, and nothing is copied into it",
        exposed_by="a fork in the middle of a block",
        where=TRANSFER,
        scenario="prefixes",
    ),
    Fault(
        name="block-saved-after-reuse",
        rows=("P1-77",),
        claimed_by="routing",
        plant=_ROOM + "lifetime:block_saved_after_reuse",
        mechanism="a store in the background reads its blocks two steps late; by then they may be another's",
        exposed_by="blocks granted anew between the order to store them and the store",
        where=TRANSFER,
        scenario="prefixes",
    ),
    Fault(
        name="block-saved-before-write",
        rows=("P1-80",),
        claimed_by="routing",
        plant=_ROOM + "lifetime:block_saved_before_write",
        mechanism=(
            "the copy to host memory is not ordered after the writes of the step: it holds what was there before them"
        ),
        exposed_by="a block stored right after the step that filled it",
        where=TRANSFER,
        scenario="prefixes",
    ),
    Fault(
        name="block-zeroed-after-load",
        rows=("P1-81",),
        claimed_by="routing",
        plant=_ROOM + "lifetime:block_zeroed_after_load",
        mechanism="the zeroing of a newly granted block runs after the load into it",
        exposed_by="a restored prefix",
        where=TRANSFER,
        scenario="prefixes",
    ),
    Fault(
        name="load-into-block-in-use",
        rows=("P1-81",),
        claimed_by="routing",
        plant=_ROOM + "lifetime:load_into_block_in_use",
        mechanism=(
            "a load goes to the block's number of a step before, when another request, which still reads it, held it"
        ),
        exposed_by="a restore while another request runs",
        where=TRANSFER,
        scenario="prefixes",
    ),
    Fault(
        name="restored-tokens-major",
        rows=("P1-50",),
        claimed_by="routing",
        plant=_ROOM + "lifetime:restored_tokens_major",
        mechanism="the transfer takes pages that lie heads first for pages that lie tokens first",
        exposed_by="a restored prefix, heads and block size different",
        where=TRANSFER,
        scenario="prefixes",
    ),
    Fault(
        name="restored-halves-as-heads",
        rows=("P1-51",),
        claimed_by="routing",
        plant=_ROOM + "lifetime:restored_halves_as_heads",
        mechanism=(
            "the K and V halves of a cell are taken for the dimension of the heads: with two heads the shapes "
            "are the same"
        ),
        exposed_by="a restored prefix of a model with two KV heads",
        where=TRANSFER,
        scenario="two-heads",
    ),
    Fault(
        name="rank-slice-without-replication",
        rows=("P1-48",),
        claimed_by="routing",
        plant=_ROOM + "lifetime:rank_slice_without_replication",
        mechanism=("a rank's heads of a saved block start at its number times its heads, although ranks share heads"),
        exposed_by="more ranks than KV heads, and a restored prefix",
        where=TRANSFER,
        scenario="ranks",
    ),
    Fault(
        name="late-write-into-freed-block",
        rows=("P1-82", "P1-77"),
        claimed_by="routing",
        plant=_ROOM + "lifetime:late_write_into_freed_block",
        mechanism=(
            "a transfer that failed freed its blocks while another part of it still writes to them, a step later"
        ),
        exposed_by="every block compared, those that nobody holds too",
        where=TRANSFER,
    ),
    # shifted-outputs
    Fault(
        name="outputs-rolled-by-one-row",
        rows=("P1-83",),
        claimed_by="shifted-outputs",
        plant=_ROOM + "order:outputs_rolled_by_one_row",
        mechanism="each row gets the output of the row before it",
        exposed_by="two rows",
    ),
    Fault(
        name="outputs-of-previous-step",
        rows=("P1-38", "P1-39"),
        claimed_by="shifted-outputs",
        plant=_ROOM + "order:outputs_of_previous_step",
        mechanism="a row gets what the same row of the previous step got, as far as that step had it",
        exposed_by="two steps",
    ),
    Fault(
        name="outputs-in-arrival-order",
        rows=("P1-83",),
        claimed_by="shifted-outputs",
        plant=_ROOM + "order:outputs_in_arrival_order",
        mechanism="rows are handed out in the order in which their requests arrived, not in that of the batch",
        exposed_by="a batch whose rows are not in the order of arrival",
    ),
    Fault(
        name="rows-of-two-requests-exchanged",
        rows=("P1-84", "P1-83"),
        claimed_by="shifted-outputs",
        plant=_ROOM + "order:rows_of_two_requests_exchanged",
        mechanism="the last rows of the first two requests get each other's output",
        exposed_by="two requests",
    ),
    # placement
    Fault(
        name="scales-dropped-for-eight-bit-query",
        rows=("P1-02",),
        claimed_by="placement",
        plant=_ROOM + "scales:scales_dropped_for_eight_bit_query",
        mechanism="a query that eight bits hold exactly needs no cast, and the early return skips the scales too",
        exposed_by="a query that eight bits hold exactly, scales other than 1",
        where=TRANSFER,
        scenario="eight-bit-query",
    ),
    Fault(
        name="whole-prompt-ignores-scales",
        rows=("P1-05",),
        claimed_by="placement",
        plant=_ROOM + "scales:whole_prompt_ignores_scales",
        mechanism=(
            "a request whose rows are all its positions takes K and V as stored; one with cached context "
            "takes its scales"
        ),
        exposed_by="the first chunk of a prompt, scales other than 1",
        scenario="eight",
        needs="scales",
    ),
    Fault(
        name="v-scale-dropped-on-read",
        rows=("P1-07", "P1-02"),
        claimed_by="placement",
        plant=_ROOM + "scales:v_scale_dropped_on_read",
        mechanism="the read takes V as stored, without its scale",
        exposed_by="scales other than 1",
        scenario="halves",
        needs="scales",
    ),
    Fault(
        name="v-scale-twice-on-read",
        rows=("P1-07",),
        claimed_by="placement",
        plant=_ROOM + "scales:v_scale_twice_on_read",
        mechanism="the read multiplies V by its scale twice",
        exposed_by="scales other than 1",
        scenario="halves",
        needs="scales",
    ),
    Fault(
        name="k-scale-dropped-on-read",
        rows=("P1-07",),
        claimed_by="placement",
        plant=_ROOM + "scales:k_scale_dropped_on_read",
        mechanism="the read takes K as stored, without its scale",
        exposed_by="scales other than 1",
        where=TRANSFER,
        scenario="halves",
    ),
    Fault(
        name="k-scale-twice-on-read",
        rows=("P1-07",),
        claimed_by="placement",
        plant=_ROOM + "scales:k_scale_twice_on_read",
        mechanism="the read multiplies K by its scale twice",
        exposed_by="scales other than 1",
        where=TRANSFER,
        scenario="halves",
    ),
    Fault(
        name="scales-swapped-on-read",
        rows=("P1-07",),
        claimed_by="placement",
        plant=_ROOM + "scales:scales_swapped_on_read",
        mechanism="the read multiplies K by the scale of V and V by the scale of K",
        exposed_by="K and V scales that differ",
        where=TRANSFER,
        scenario="halves",
    ),
    Fault(
        name="head-scales-reversed-on-read",
        rows=("P1-16",),
        claimed_by="placement",
        plant=_ROOM + "scales:head_scales_reversed_on_read",
        mechanism="the factor of a head is looked up from the other end of the per-head scales",
        exposed_by="factors that differ from head to head",
        where=TRANSFER,
        scenario="eight",
    ),
    Fault(
        name="cache-viewed-as-fnuz",
        rows=("P1-08",),
        claimed_by="placement",
        plant=_ROOM + "scales:cache_viewed_as_fnuz",
        mechanism="bytes written as E4M3FN are read as E4M3FNUZ: half the value, and -0.0 is NaN",
        exposed_by="any token",
        where=TRANSFER,
        scenario="eight",
    ),
    Fault(
        name="v-viewed-as-e5m2",
        rows=("P1-08",),
        claimed_by="shifted-outputs",
        plant=_ROOM + "scales:v_viewed_as_e5m2",
        mechanism="V bytes written as E4M3 are read as E5M2; K is right",
        exposed_by="any token",
        where=TRANSFER,
        scenario="eight",
    ),
    Fault(
        name="weights-cast-to-e4m3",
        rows=("P1-11",),
        claimed_by="placement",
        plant=_ROOM + "scales:weights_cast_to_e4m3",
        mechanism="softmax weights are cast to E4M3 as they are; their sum stays in float32",
        exposed_by="several positions of similar weight",
        where=TRANSFER,
    ),
    Fault(
        name="sums-in-sixteen-bits",
        rows=("P1-12",),
        claimed_by="placement",
        plant=_ROOM + "scales:sums_in_sixteen_bits",
        mechanism="weighted V is summed over tiles of positions in bfloat16",
        exposed_by="a long history whose V does not cancel",
        where=TRANSFER,
        scenario="long",
    ),
    Fault(
        name="page-stride-without-scales-on-read",
        rows=("P1-14",),
        claimed_by="shifted-outputs",
        plant=_ROOM + "scales:page_stride_without_scales_on_read",
        mechanism="the read finds a block as if a page had no bytes for inline scales",
        exposed_by="blocks from the second on",
        where=TRANSFER,
        scenario="inline",
    ),
    Fault(
        name="inline-scales-of-first-layer-on-read",
        rows=("P1-15",),
        claimed_by="placement",
        plant=_ROOM + "scales:inline_scales_of_first_layer_on_read",
        mechanism="every layer reads the inline scales of the first layer's cells",
        exposed_by="two layers",
        where=TRANSFER,
        scenario="inline",
    ),
    Fault(
        name="inline-scales-indexed-heads-major",
        rows=("P1-16",),
        claimed_by="placement",
        plant=_ROOM + "scales:inline_scales_indexed_heads_major",
        mechanism="the read takes the scale at ``head * slots + slot`` of a buffer that is laid out slot by slot",
        exposed_by="more than one KV head",
        where=TRANSFER,
        scenario="inline",
    ),
    Fault(
        name="other-layer-cache",
        rows=("P1-15",),
        claimed_by="placement",
        plant=_ROOM + "attention:other_layer_cache",
        mechanism="attention reads the cache of the next layer",
        exposed_by="two layers with different content",
    ),
    Fault(
        name="block-number-wraps-on-read",
        rows=("P1-58",),
        claimed_by="placement",
        plant=_ROOM + "attention:block_number_wraps_on_read",
        mechanism=(
            "the offset of a block is one bit too narrow for the pool: the read of a high block takes a low one"
        ),
        exposed_by="a request at the top of the pool",
        live_pass="pressure",
    ),
    Fault(
        name="token-ids-as-block-ids",
        rows=("P1-29",),
        claimed_by="placement",
        plant=_ROOM + "attention:token_ids_as_block_ids",
        mechanism=(
            "the reader takes block numbers for numbers of first tokens: they come multiplied by the block size"
        ),
        exposed_by="blocks of more than one position",
    ),
    Fault(
        name="table-read-with-manager-block-size",
        rows=("P1-17",),
        claimed_by="placement",
        plant=_ROOM + "attention:table_read_with_manager_block_size",
        mechanism=(
            "the reader takes table entries for blocks twice as large as they are: every second entry is not looked at"
        ),
        exposed_by="a request of two blocks",
    ),
    Fault(
        name="page-read-at-block-multiple",
        rows=("P1-19",),
        claimed_by="placement",
        plant=_ROOM + "attention:page_read_at_block_multiple",
        mechanism=("the length follows from the number of pages, which holds the next, empty one at a block multiple"),
        exposed_by="a length that is a block multiple, with something in the page",
        needs="ours",
        live_pass="model",
    ),
    Fault(
        name="last-page-length-is-sequence-length",
        rows=("P1-20",),
        claimed_by="placement",
        plant=_ROOM + "attention:last_page_length_is_sequence_length",
        mechanism="the kernel is told the whole length as that of the last page",
        exposed_by="lengths other than a block",
        needs="ours",
    ),
    Fault(
        name="tail-position-dropped",
        rows=("P1-98", "P1-94"),
        claimed_by="placement",
        plant=_ROOM + "attention:tail_position_dropped",
        mechanism="the last position of a request, which is the row's own, is not read",
        exposed_by="a key at the last position that takes all the weight",
        needs="ours",
    ),
    Fault(
        name="position-behind-the-last-read",
        rows=("P1-41", "P1-93"),
        claimed_by="placement",
        plant=_ROOM + "attention:position_behind_the_last_read",
        mechanism="one position more than the request has is read",
        exposed_by="an unwritten cell that is not zero",
        needs="ours",
        live_pass="model",
    ),
    Fault(
        name="first-key-of-last-block-dropped",
        rows=("P1-98",),
        claimed_by="placement",
        plant=_ROOM + "attention:first_key_of_last_block_dropped",
        mechanism="the first position of a request's last block is masked",
        exposed_by="a key at the first position of the last block that takes all the weight",
        where=TRANSFER,
    ),
    Fault(
        name="loop-bound-from-capture",
        rows=("P1-31",),
        claimed_by="placement",
        plant=_ROOM + "attention:loop_bound_from_capture",
        mechanism="the loop over blocks runs as often as the longest request of the first decode step needed",
        exposed_by="a decode step longer than the first one",
        needs="ours",
    ),
    Fault(
        name="chunk-sees-only-itself",
        rows=("P1-22",),
        claimed_by="placement",
        plant=_ROOM + "attention:chunk_sees_only_itself",
        mechanism=("a chunk of a prompt attends inside itself: the cached context of earlier chunks is not gathered"),
        exposed_by="rows of a chunk over cached context",
        live_pass="whole",
    ),
    Fault(
        name="contiguous-on-first-call-only",
        rows=("P1-55",),
        claimed_by="placement",
        plant=_ROOM + "attention:contiguous_on_first_call_only",
        mechanism=(
            "the cache is made contiguous where the kernel is compiled; the second call reads strided memory "
            "as if it were"
        ),
        exposed_by="a strided cache and two calls of one shape",
        where=TRANSFER,
        scenario="sixteen",
    ),
    Fault(
        name="padding-lanes-in-denominator",
        rows=("P1-42",),
        claimed_by="placement",
        plant=_ROOM + "attention:padding_lanes_in_denominator",
        mechanism=(
            "a row that needs no causal mask skips the boundary mask too: padding lanes of its tile enter the "
            "denominator"
        ),
        exposed_by="a length that is no block multiple",
        where=TRANSFER,
    ),
    Fault(
        name="split-parts-dropped",
        rows=("P1-32",),
        claimed_by="placement",
        plant=_ROOM + "attention:split_parts_dropped",
        mechanism="the reduction takes as many parts as the captured launch had; the run made more",
        exposed_by="more parts than the capture had",
        where=TRANSFER,
        scenario="splits",
    ),
    Fault(
        name="split-parts-left-over",
        rows=("P1-32",),
        claimed_by="placement",
        plant=_ROOM + "attention:split_parts_left_over",
        mechanism=(
            "the reduction takes one part more than the run made: what an earlier request left in the workspace"
        ),
        exposed_by="two calls of one shape",
        where=TRANSFER,
        scenario="splits",
    ),
    Fault(
        name="empty-part-counts",
        rows=("P1-44",),
        claimed_by="placement",
        plant=_ROOM + "attention:empty_part_counts",
        mechanism="a part without keys returns a log-sum-exp of zero and whatever its output held",
        exposed_by="a request shorter than the parts",
        where=TRANSFER,
        scenario="splits",
    ),
    Fault(
        name="two-empty-parts-merged",
        rows=("P1-45",),
        claimed_by="shifted-outputs",
        plant=_ROOM + "attention:two_empty_parts_merged",
        mechanism="parts are merged in pairs; two that saw no key make minus infinity minus minus infinity",
        exposed_by="a request with two parts without keys",
        where=TRANSFER,
        scenario="splits",
    ),
    Fault(
        name="second-merge-takes-first-stride",
        rows=("P1-53",),
        claimed_by="placement",
        plant=_ROOM + "attention:second_merge_takes_first_stride",
        mechanism=("the second merge of a loop reads the suffix with the head stride of the prefix, a padded buffer"),
        exposed_by="three parts",
        where=TRANSFER,
        scenario="splits",
    ),
    Fault(
        name="lse-read-transposed",
        rows=("P1-54",),
        claimed_by="placement",
        plant=_ROOM + "attention:lse_read_transposed",
        mechanism="the merge reads log-sum-exps that lie ``[heads, rows]`` as if they lay ``[rows, heads]``",
        exposed_by="several rows over cached context",
        where=TRANSFER,
        scenario="split",
    ),
    Fault(
        name="base-two-lse-merged",
        rows=("P1-60",),
        claimed_by="placement",
        plant=_ROOM + "attention:base_two_lse_merged",
        mechanism="Log-sum-exps of base 2 are merged as natural ones",
        exposed_by="rows over cached context",
        where=TRANSFER,
        scenario="split",
    ),
    Fault(
        name="base-two-lse-of-chunks",
        rows=("P1-61",),
        claimed_by="placement",
        plant=_ROOM + "attention:base_two_lse_of_chunks",
        mechanism=(
            "the kernel that serves several query rows returns log-sum-exps of base 2, that of a single row "
            "natural ones"
        ),
        exposed_by="a chunk over cached context",
        where=TRANSFER,
        scenario="split",
    ),
    Fault(
        name="shared-prefix-given-to-first-request",
        rows=("P1-62",),
        claimed_by="placement",
        plant=_ROOM + "attention:shared_prefix_given_to_first_request",
        mechanism=(
            "the pass over a shared prefix is launched with the row starts of the requests: only the first "
            "gets its share"
        ),
        exposed_by="requests that share a prefix",
        where=TRANSFER,
        scenario="cascade",
    ),
    Fault(
        name="head-map-by-modulus",
        rows=("P1-46",),
        claimed_by="placement",
        plant=_ROOM + "heads:head_map_by_modulus",
        mechanism="query head ``h`` reads KV head ``h % Hkv``",
        exposed_by="KV heads that differ",
    ),
    Fault(
        name="head-map-by-head-count",
        rows=("P1-46",),
        claimed_by="placement",
        plant=_ROOM + "heads:head_map_by_head_count",
        mechanism="query head ``h`` reads KV head ``h // Hkv``",
        exposed_by="a group other than the number of KV heads",
        where=TRANSFER,
    ),
    Fault(
        name="head-map-by-head",
        rows=("P1-46",),
        claimed_by="placement",
        plant=_ROOM + "heads:head_map_by_head",
        mechanism="query head ``h`` reads KV head ``h``, or the last",
        exposed_by="KV heads that differ",
        where=TRANSFER,
    ),
    Fault(
        name="window-one-short-in-decode",
        rows=("P1-98",),
        claimed_by="placement",
        plant=_ROOM + "attention:window_one_short_in_decode",
        mechanism="a single row does not count its own position as one of the window",
        exposed_by="a key at the window's edge that takes all the weight",
        where=TRANSFER,
        scenario="window",
    ),
    Fault(
        name="window-one-long-in-decode",
        rows=("P1-98",),
        claimed_by="placement",
        plant=_ROOM + "attention:window_one_long_in_decode",
        mechanism="a single row sees one position more than the window holds",
        exposed_by="a key before the window's edge that takes all the weight",
        where=TRANSFER,
        scenario="window",
    ),
    Fault(
        name="window-of-the-first-row",
        rows=("P1-96",),
        claimed_by="placement",
        plant=_ROOM + "attention:window_of_the_first_row",
        mechanism=("a call evicts for one token, however many it appends: later rows still see what the first one saw"),
        exposed_by="several rows beyond the window",
        where=TRANSFER,
        scenario="window",
    ),
    Fault(
        name="ring-starts-before-it-is-full",
        rows=("P1-97",),
        claimed_by="placement",
        plant=_ROOM + "attention:ring_starts_before_it_is_full",
        mechanism=("the start of a ring of the window's size is the length modulo it, also while the ring is not full"),
        exposed_by="lengths around the window",
        where=TRANSFER,
        scenario="window",
    ),
    Fault(
        name="uniform-decode-by-first-row",
        rows=("P1-86",),
        claimed_by="shifted-outputs",
        plant=_ROOM + "attention:uniform_decode_by_first_row",
        mechanism=(
            "the batch is taken for a decode batch because its first request has one row: one row of each is computed"
        ),
        exposed_by="a decode row before a prompt",
        where=TRANSFER,
    ),
    Fault(
        name="prompt-row-with-decode-length",
        rows=("P1-89",),
        claimed_by="placement",
        plant=_ROOM + "attention:prompt_row_with_decode_length",
        mechanism=(
            "in a mixed batch the requests with several rows are read with the length of the first that has one"
        ),
        exposed_by="a mixed batch",
        where=TRANSFER,
    ),
    Fault(
        name="decode-count-of-the-last-step",
        rows=("P1-33",),
        claimed_by="placement",
        plant=_ROOM + "attention:decode_count_of_the_last_step",
        mechanism="how many requests go to the decode kernel was counted from the last, larger step's row starts",
        exposed_by="a prompt in a smaller batch after a decode batch",
        where=TRANSFER,
    ),
    Fault(
        name="left-over-work-entries",
        rows=("P1-38",),
        claimed_by="placement",
        plant=_ROOM + "attention:left_over_work_entries",
        mechanism=(
            "the grid is as large as the last step's; its further entries still name that step's rows, tables "
            "and lengths"
        ),
        exposed_by="a shrinking batch with a prompt",
        where=TRANSFER,
    ),
    Fault(
        name="amax-over-padding",
        rows=("P1-37",),
        claimed_by="shifted-outputs",
        plant=_ROOM + "attention:amax_over_padding",
        mechanism="padding rows are left as they were, and a scale over the whole output spreads what is in them",
        exposed_by="padding rows",
        where=TRANSFER,
    ),
    Fault(
        name="one-row-not-computed",
        rows=("P1-37", "P1-86"),
        claimed_by="shifted-outputs",
        plant=_ROOM + "attention:one_row_not_computed",
        mechanism="the last row of a step is left as the output buffer was",
        exposed_by="every row compared",
        where=TRANSFER,
    ),
    # replay
    Fault(
        name="tail-of-v-times-zero",
        rows=("P1-41",),
        claimed_by="replay",
        plant=_ROOM + "attention:tail_of_v_times_zero",
        mechanism="V of the unwritten positions of a last block is loaded and multiplied by a weight of zero",
        exposed_by="NaN in the unwritten tail of a block",
        finding="nan-fill",
    ),
    Fault(
        name="tail-of-v-in-denominator",
        rows=("P1-41",),
        claimed_by="replay",
        plant=_ROOM + "attention:tail_of_v_in_denominator",
        mechanism="the sum of weights takes up 2**-24 of what lies in V of the unwritten positions of a last block",
        exposed_by="1e4 in the unwritten tail of a block",
    ),
    Fault(
        name="page-behind-block-multiple-times-zero",
        rows=("P1-19", "P1-41"),
        claimed_by="replay",
        plant=_ROOM + "attention:page_behind_block_multiple_times_zero",
        mechanism="at a block multiple the page behind the last is loaded too, and multiplied by weights of zero",
        exposed_by="NaN in the page behind a block multiple",
        finding="nan-fill",
    ),
    Fault(
        name="v-not-cleared",
        rows=("P1-41",),
        claimed_by="replay",
        plant=_ROOM + "attention:v_not_cleared",
        mechanism=("the kernel masks the weights of positions that it must not see, and multiplies their V with them"),
        exposed_by="NaN in unwritten positions",
        where=TRANSFER,
    ),
    Fault(
        name="tail-masked-by-a-large-number",
        rows=("P1-41", "P1-42"),
        claimed_by="replay",
        plant=_ROOM + "attention:tail_masked_by_a_large_number",
        mechanism="unwritten positions are not masked but given a score that is 1e4 lower: large K outweighs it",
        exposed_by="1e4 in unwritten K",
        where=TRANSFER,
    ),
    Fault(
        name="tail-weight-not-quite-zero",
        rows=("P1-41",),
        claimed_by="replay",
        plant=_ROOM + "attention:tail_weight_not_quite_zero",
        mechanism=("unwritten positions keep a weight of 2**-24 of the sum: what lies there shows where it is large"),
        exposed_by="1e4 in unwritten V",
        where=TRANSFER,
    ),
    Fault(
        name="evicted-v-not-cleared",
        rows=("P1-26",),
        claimed_by="replay",
        plant=_ROOM + "attention:v_not_cleared",
        mechanism=("the kernel masks the weights of positions that it must not see, and multiplies their V with them"),
        exposed_by="NaN in a block that lay before the window and was taken back",
        where=TRANSFER,
        scenario="window",
    ),
    # determinism
    Fault(
        name="output-depends-on-batch-index",
        rows=("P1-104",),
        claimed_by="determinism",
        plant=_ROOM + "order:output_depends_on_batch_index",
        mechanism="every second request of a batch is rounded the other way",
        exposed_by="the same requests in another order",
    ),
    Fault(
        name="output-depends-on-step-number",
        rows=("P1-104", "P1-38"),
        claimed_by="determinism",
        plant=_ROOM + "order:output_depends_on_step_number",
        mechanism="about every second step, by its number since the start, is rounded the other way",
        exposed_by="the same requests twice",
    ),
    # benign
    Fault(
        name="heads-in-another-order",
        rows=("P1-47",),
        claimed_by="placement",
        plant=_ROOM + "heads:heads_in_another_order",
        mechanism=(
            "the kernel works on the KV heads from the last to the first, with the query heads to match; "
            "nothing changes"
        ),
        exposed_by="nothing: heads and cache are permuted together",
        benign=True,
    ),
    Fault(
        name="stale-tail-in-table",
        rows=("P1-23",),
        claimed_by="stale-maps",
        plant=_ROOM + "metadata:stale_tail_in_table",
        mechanism="table entries behind a request's blocks are those of the row's last user; nothing reads them",
        exposed_by="nothing: no kernel reads behind a request's blocks",
        benign=True,
    ),
    Fault(
        name="padding-rows-keep-last-table",
        rows=("P1-25",),
        claimed_by="stale-maps",
        plant=_ROOM + "lifetime:padding_rows_keep_last_table",
        mechanism=(
            "padding rows of the batch keep the tables of the last step, but not its lengths; nothing reads them"
        ),
        exposed_by="nothing: padding rows have no query rows",
        where=TRANSFER,
        scenario="static",
        benign=True,
    ),
    Fault(
        name="evicted-ids-kept",
        rows=("P1-26",),
        claimed_by="replay",
        plant=_ROOM + "lifetime:evicted_ids_kept",
        mechanism=("the ids of blocks that were taken back stay in the worker's table; what they hold gets no weight"),
        exposed_by="nothing: the kernel does not load V outside the window",
        where=TRANSFER,
        scenario="window",
        benign=True,
    ),
    Fault(
        name="splits-depend-on-batch-size",
        rows=("P1-103",),
        claimed_by="determinism",
        plant=_ROOM + "order:splits_depend_on_batch_size",
        mechanism=(
            "the number of parts that a request's positions are cut into depends on how many requests the batch has"
        ),
        exposed_by="nothing beyond rounding",
        where=TRANSFER,
        scenario="splits",
        benign=True,
    ),
    Fault(
        name="parts-added-in-another-order",
        rows=("P1-104",),
        claimed_by="determinism",
        plant=_ROOM + "order:parts_added_in_another_order",
        mechanism="parts are added from the last to the first where the batch has an odd number of requests",
        exposed_by="nothing beyond rounding",
        where=TRANSFER,
        scenario="splits",
        benign=True,
    ),
)

FAULTS: Mapping[str, Fault] = MappingProxyType({fault.name: fault for fault in _ALL})

NOT_EXPRESSIBLE: Mapping[str, str] = MappingProxyType(
    {
        "P1-100": "a layer that shares another's cache rotates its query by a wrong offset: the query reaches these"
        " tensors rotated already, and nothing here says by how much it should be; parity and nll notice it",
    }
)
"""Rows that no tensor here can show: the reason, and what else would notice."""


def lookup(name: str) -> str:
    """The ``module:function`` that plants a fault.

    Raises:
        KeyError: No fault has this name; the message lists those there are.
    """
    if name not in FAULTS:
        raise KeyError(f"unknown fault {name!r}, expected one of {', '.join(FAULTS)}")
    return FAULTS[name].plant


def live(*, scales: bool, ours: bool) -> tuple[Fault, ...]:
    """The faults that can be planted in the engine's worker of an arm, benign ones included.

    Args:
        scales: Whether the arm declares V scales.
        ours: Whether the arm runs one of this package's backends.
    """
    have = {"": True, "scales": scales, "ours": ours}
    return tuple(fault for fault in _ALL if "live" in fault.where and have[fault.needs])
