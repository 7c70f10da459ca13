"""Workers with another tokenizer than the router's."""

from structlog.testing import capture_logs

from prfaas.cluster import ClusterView, Incarnation, Namespace, Node, NodeId, NodeKind, RegionId, Role
from services.router.same_tokenizer import SameTokenizer


def node(name: str, tokenizer: str) -> Node:
    return Node(
        id=NodeId(name),
        region=RegionId("pd"),
        kind=NodeKind.PD,
        role=Role.MIXED,
        incarnation=Incarnation(1),
        namespace=Namespace("n"),
        model="m",
        rpc_address="127.0.0.1:1",
        max_context_tokens=100,
        tokenizer=tokenizer,
    )


def view(**tokenizers: str) -> ClusterView:
    nodes = {NodeId(name): node(name, tokenizer) for name, tokenizer in tokenizers.items()}
    return ClusterView(nodes=nodes, local_prefill=list(nodes), decode=list(nodes))


def test_they_do_not_exist_for_it():
    """In no list of the view; it is told once, as an error. Those that do not say are believed."""
    seen = view(d0="ours", d1="theirs", d2="")
    shown = SameTokenizer(lambda: seen, "ours")
    with capture_logs() as logs:
        own = shown()
        assert shown() is own
        seen = view(d0="ours", d1="theirs", d2="", d3="ours")
        shown()
    assert (list(own.nodes), own.local_prefill, own.decode) == (["d0", "d2"], ["d0", "d2"], ["d0", "d2"])
    assert shown.others == ("d1",)
    assert [(line["log_level"], line["nodes"]) for line in logs] == [("error", ["d1"])]


def test_where_all_are_alike_nothing_is_copied():
    """The common case costs one look at each new view."""
    seen = view(d0="ours", d1="ours")
    shown = SameTokenizer(lambda: seen, "ours")
    assert shown() is seen
    assert shown.others == ()
