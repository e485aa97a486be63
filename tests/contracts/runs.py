"""Runs, constants and times that a policy may meet."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from saga_core.pauses import PauseModel, View, Wait
from saga_core.policies import POLICIES, make_policy
from saga_core.retention import Run, RunState
from saga_core.settings import RetentionSettings

PROPERTY = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
SHARE = st.floats(0.0, 1.0)
every_policy = pytest.mark.parametrize("name", sorted(POLICIES))
# Few values beside the many, so that runs tie.
TIMES = st.integers(0, 20).map(float) | st.floats(0.0, 1e5)

constants = st.just(RetentionSettings()) | st.builds(
    RetentionSettings,
    alpha=SHARE,
    beta=SHARE,
    gamma=SHARE,
    tau_max_s=st.floats(1.0, 1e4),
    protect_min_p_reuse=SHARE,
)
PRESSURE = 0.8
KINDS = ["paused", "ended", "superseded", "shared", "plain"]


def run_of(run_id):
    """Any run, with ties in every field; ``run_id`` is a strategy."""
    waits = st.builds(
        lambda kind, since_s, scale: Wait(View((kind,), since_s, scale)),
        st.sampled_from(KINDS),
        TIMES,
        st.sampled_from([1.0, 0.1, 60.0]),
    )
    return st.builds(
        Run,
        run_id,
        st.sampled_from(RunState),
        TIMES,
        idle_since_s=TIMES,
        size_share=st.sampled_from([0.0, 0.1, 1.0]) | SHARE,
        uses=st.integers(1, 5),
        p_reuse=st.sampled_from([0.0, 0.5, 1.0]) | SHARE,
        pause_p95_s=st.sampled_from([0.0, 5.0, 1e4]) | TIMES,
        wait=st.none() | waits,
        reload_share=st.sampled_from([1.0, 0.1, 0.0]),
    )


def make(name, s=None):
    """A policy with a model of its own, which has seen nothing."""
    return make_policy(name, s or RetentionSettings(), PauseModel())
