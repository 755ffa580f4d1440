"""Plans for Hypothesis: lists of small steps that stay meaningful when some are dropped."""

from hypothesis import strategies as st

from dledger.jepsen_like.plans.draw import SHAPES
from dledger.jepsen_like.plans.plan import REAL_ONLY, ROLES, Kind, Plan, Settings, Step, Workload

kinds = st.sampled_from(sorted(set(Kind) - REAL_ONLY))
targets = st.sampled_from(ROLES) | st.integers(0, 15).map(str)


@st.composite
def steps(draw: st.DrawFn, duration_ms: int = 60_000) -> Step:
    """A step of any kind, with an argument that its kind understands."""
    kind = draw(kinds)
    shape = SHAPES[kind]
    return Step(
        draw(st.integers(0, duration_ms)),
        kind,
        draw(targets),
        draw(st.integers(*shape.for_ms)),
        draw(st.integers(*shape.arg)),
    )


@st.composite
def plans(draw: st.DrawFn, steps_max: int = 12, duration_ms: int = 60_000) -> Plan:
    """A plan; its seed is drawn last, so that shrinking keeps the shape."""
    drawn = draw(st.lists(steps(duration_ms), max_size=steps_max))
    workload = draw(
        st.builds(
            Workload,
            producers=st.integers(1, 3),
            interval_ms=st.sampled_from((200, 1000)),
            delayed_per_mille=st.sampled_from((0, 300)),
        )
    )
    settings = draw(st.builds(Settings, queue_units=st.sampled_from((8, 64))))
    return Plan(
        seed=draw(st.integers(0, 255)),
        duration_ms=duration_ms,
        steps=tuple(sorted(drawn, key=lambda step: step.at_ms)),
        workload=workload,
        settings=settings,
    )
