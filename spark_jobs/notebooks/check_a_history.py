# %% [markdown]
# # Checking a history
#
# A history is what clients of a cluster saw: one row per attempt, with the time of its call and of
# its return. Two runs are shipped with this notebook. In both, brokers were killed and cut off and
# leadership was moved while clients sent and read. In the *good* one the brokers are as they are.
# In the *broken* one a bug was planted in them: what a majority has not stored yet may be lost.
#
# Any other run will do: set `GOOD` or `BROKEN` to its folder.

# %% tags=["parameters"]
import os
import tempfile
from pathlib import Path

from spark_jobs.notebooks.pictures import SHIPPED

GOOD = SHIPPED / "good"
BROKEN = SHIPPED / "broken"
PICTURES = Path(os.environ.get("DLEDGER_PICTURES") or tempfile.mkdtemp(prefix="dledger-pictures-"))

# %%
import time

from IPython.display import Image, display

from jepsen_like.checkers import queue_log
from spark_jobs.notebooks.pictures import MORE, PICTURE, Looked, as_text, head
from spark_jobs.run import judge_run


def shown(path: Path) -> None:
    display(Image(filename=str(path), width=1000))


good, broken = Looked(GOOD, PICTURES / "good"), Looked(BROKEN, PICTURES / "broken")

# %% [markdown]
# ## The rows
#
# `ops` has one row per attempt, `obs` one per message that a read found, `events` faults and
# changes of role, `nodes` what brokers said of themselves. Nothing is null: `-1` says nothing.

# %%
print(head(good.table("ops"), 6, "op_id", "process", "f", "outcome", "call_ns", "topic", "queue",
           "off", "cnt", "max_off", "value"))  # fmt: skip
for name in ("ops", "obs", "events", "nodes"):
    print(f"{name}: {good.table(name).num_rows} rows")

# %% [markdown]
# ## The verdict
#
# One call, without a JVM. *Valid* means: there is one order of all operations that clients cannot
# tell from what they saw, nothing acknowledged is missing, and so on for every promise.

# %%
verdict = judge_run(GOOD, "local", time.monotonic)
print(verdict.verdict, "after", verdict.seconds, "s; digest", verdict.digest[:16])
print(as_text([
    {"checker": one.checker, "verdict": one.validity, "looked at": str(one.counts)}
    for one in verdict.verdicts
]))  # fmt: skip
assert verdict.verdict != "invalid"

# %% [markdown]
# ## What the good run was like
#
# Coloured bands are faults. Every operation by itself, then percentiles, rates, who led, how far
# followers were behind, when nothing was acknowledged, and what was done.

# %%
for name in PICTURE:
    shown(good.draw(name))

# %% [markdown]
# Messages that were acknowledged and not read yet come down to few in the end. In the timeline
# each lane is a client; what had no answer is pale and lasts until the end of the run, for nobody
# knows when it happened, or if. Such a client goes on under another number.

# %%
for name in MORE:
    shown(good.draw(name))

# %% [markdown]
# ## Why the good run is valid
#
# For each offset of a queue there is a time until which it was certainly missing, and one from
# which on it was certainly there: a send is not there before its call, and is there when it has
# returned; a read finds it or misses it. Earlier offsets are there earlier, so the first bound is
# carried to the right and the second to the left. If the blue line is nowhere above the yellow
# one, each append has a moment of its own between them, and reads agree with all of them.

# %%
shown(good.draw_bounds("orders", 0))

# %% [markdown]
# ## The broken run

# %%
judged = judge_run(BROKEN, "local", time.monotonic)
print(judged.verdict)
names = {(one["checker"], one["name"]) for one in judged.anomalies}
print(as_text([
    {
        "checker": checker,
        "anomaly": name,
        "named": sum((a["checker"], a["name"]) == (checker, name) for a in judged.anomalies),
    }
    for checker, name in sorted(names)
]))  # fmt: skip
assert judged.verdict == "invalid"

# %%
for name in ("latency-raw", "leader", "unseen"):
    shown(broken.draw(name))

# %% [markdown]
# ## One violation, step by step
#
# The first one of the log of a queue, and the two operations that prove it.

# %%
violation = next(
    one
    for verdict in judged.verdicts
    if verdict.checker == queue_log.NAME
    for one in verdict.violations
)
topic, queue = violation.subject.rsplit("/", 1)
print(violation.name, "in", violation.subject)
print(violation.detail)
witnesses = broken.witnesses(violation)
print(as_text(witnesses))

# %% [markdown]
# Both had an answer, and the answers contradict each other. What do the replicas hold there?

# %%
off = max(row["offset"] for row in witnesses)
print("offset", off, broken.held_at(topic, int(queue), off))

# %% [markdown]
# And what happened between the two? Look for a leader that was killed or cut off after it had
# acknowledged the first, and for another that led without it.

# %%
stamps = [row["called at s"] for row in witnesses]
print(as_text(broken.happened_between(min(stamps) - 1, max(stamps) + 0.1)))

# %% [markdown]
# The same as a picture: time to the right, offsets upwards. The queue grows, is cut back, and grows
# again over offsets that were given away before.

# %%
shown(broken.draw_order(violation))
shown(broken.draw_bounds(topic, int(queue)))

# %% [markdown]
# ## The same with Spark
#
# One task per queue and the same kernel. One digest: both found the same. Without Java 17 this is
# left out.

# %%
from spark_jobs.engines.session import why_no_java

if why_no_java() is None:
    again = judge_run(BROKEN, "spark", time.monotonic, master="local[2]")
    print("spark", again.verdict, again.seconds, "s", again.digest == judged.digest)
    assert again.digest == judged.digest
else:
    print(why_no_java())
