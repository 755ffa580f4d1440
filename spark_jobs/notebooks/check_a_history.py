# %% [markdown]
# # From a verdict to the two operations that prove it
#
# A history is what clients of a cluster saw: one row per attempt, with the time of its call and of
# its return. Two runs are shipped with this notebook. In both, brokers were killed and isolated and
# leadership was moved while clients sent and read. In the *good* one the brokers are as they are.
# In the *broken* one a bug was planted in them: what a majority has not stored yet may be lost.
#
# This notebook follows one anomaly of the broken run: the verdict, the violation, the two
# operations, what happened between them, and what the replicas hold. Then it shows the same
# pictures of the good run. Any other run will do: set `GOOD` or `BROKEN` to its folder.
#
# Two smaller runs follow, played in the simulator with a bug planted in each: a message that two
# receivers had at once, and a step that happened twice.

# %% tags=["parameters"]
import os
import tempfile
from pathlib import Path

from dledger.spark_jobs.notebooks.pictures import SHIPPED

GOOD = SHIPPED / "good"
BROKEN = SHIPPED / "broken"
POP = SHIPPED / "pop"
STEPS = SHIPPED / "steps"
PICTURES = Path(os.environ.get("DLEDGER_PICTURES") or tempfile.mkdtemp(prefix="dledger-pictures-"))

# %%
import time

from IPython.display import Image, display

from dledger.jepsen_like.checkers import pop, queue_log, steps
from dledger.spark_jobs.notebooks.pictures import MORE, PICTURE, Looked, as_text
from dledger.spark_jobs.notebooks.service_proofs import (
    draw_message,
    message_rows,
    output_rows,
    outs_of,
    step_rows,
)
from dledger.spark_jobs.run import judge_run


def shown(path: Path) -> None:
    display(Image(filename=str(path), width=1000))


good, broken = Looked(GOOD, PICTURES / "good"), Looked(BROKEN, PICTURES / "broken")
received, stepped = Looked(POP, PICTURES / "pop"), Looked(STEPS, PICTURES / "steps")

# %% [markdown]
# ## The rows
#
# `ops` has one row per attempt, `obs` one per message that a read found, `events` faults and
# changes of role, `nodes` what brokers reported. Numbers only, `-1` where there is nothing; here
# kinds and outcomes have their names.

# %%
print(as_text(broken.first_rows(8)))
for name in ("ops", "obs", "events", "nodes"):
    print(f"{name}: {broken.table(name).num_rows} rows")

# %% [markdown]
# ## The verdict
#
# One call, without a JVM. *Valid* would mean: there is one order of all operations that clients
# cannot distinguish from what they saw, nothing acknowledged is missing, and so on for every
# guarantee.

# %%
judged = judge_run(BROKEN, "local", time.monotonic)
print(judged.verdict, "after", judged.operations, "operations; digest", judged.digest[:16])
print(as_text([
    {"checker": one.checker, "verdict": one.validity, "violations": len(one.violations),
     "checked": ", ".join(f"{count:,} {name}" for name, count in one.counts.items())}
    for one in judged.verdicts
]))  # fmt: skip
assert judged.verdict == "invalid"

# %% [markdown]
# ## One violation
#
# The first one of the log of a queue, and the two operations that prove it. Both have an answer,
# and the answers contradict each other.

# %%
violation = next(
    one
    for verdict in judged.verdicts
    if verdict.checker == queue_log.NAME
    for one in verdict.violations
)
topic, queue = violation.subject.rsplit("/", 1)
print(f"{violation.name} in {violation.subject}: {violation.detail}")
witnesses = broken.witnesses(violation)
print(as_text(witnesses))

# %% [markdown]
# ## The picture that explains it
#
# One time axis, three parts. **Servers**: when each led, with its term, and below the bar the
# faults that hit it; the same faults are bands behind everything. **Clients**: their operations on
# this queue; the two witnesses are red. **Offsets**: what these operations name. The queue grows
# under the first leader; after the change of leader its offsets are given away a second time.

# %%
shown(broken.draw_order(violation))

# %% [markdown]
# Read it from left to right: A was acknowledged by a leader that was isolated within milliseconds.
# The others elected a leader that did not have the message, and it gave the same offset to B. With
# the rule that an acknowledged message is stored on a majority, every electable server has A.
#
# The events between the two, as rows:

# %%
stamps = [row["called at s"] for row in witnesses] + [row["returned at s"] for row in witnesses]
print(as_text(broken.happened_between(min(stamps) - 0.5, max(stamps) + 0.1)))

# %% [markdown]
# ## What the replicas hold there
#
# One of the two values. The other was acknowledged, and is lost.

# %%
off = max(row["offset"] for row in witnesses)
held = broken.held_at(topic, int(queue), off)
print(as_text([{"offset": off, "replica": node, "value": held[node]} for node in sorted(held)]))

# %% [markdown]
# ## How much of the queue is wrong
#
# For each offset there is a time until which it was certainly missing, and one from which on it was
# certainly there: a send is not there before its call, and is there when it has returned; a read
# finds it or misses it. Earlier offsets are there earlier, so the first bound is carried to the
# right and the second to the left. Where the blue line is above the yellow one, no append has a
# moment of its own: red.

# %%
shown(broken.draw_bounds(topic, int(queue)))

# %% [markdown]
# ## The whole broken run
#
# Latency, leaders, and messages that were acknowledged and not read.

# %%
for name in ("latency-raw", "leader", "unseen", "timeline"):
    shown(broken.draw(name))

# %% [markdown]
# ## A good run
#
# The same questions of the run without the planted bug: no violation, and between the two bounds of
# every offset is time for its append.

# %%
verdict = judge_run(GOOD, "local", time.monotonic)
print(verdict.verdict, "after", verdict.operations, "operations; digest", verdict.digest[:16])
print(as_text([
    {"checker": one.checker, "verdict": one.validity, "violations": len(one.violations)}
    for one in verdict.verdicts
]))  # fmt: skip
assert verdict.verdict != "invalid"
shown(good.draw_bounds("orders", 0))

# %% [markdown]
# Coloured bands are faults: every operation by itself, percentiles, rates, leaders, how far
# followers were behind, when nothing was acknowledged, and what was done.

# %%
for name in (*PICTURE, *MORE):
    shown(good.draw(name))

# %% [markdown]
# In the last picture each lane is a client: sends in its upper half, reads in its lower half. An
# operation without an answer is a thin line until the end of the run, for it may have happened at
# any time after its call; such a client goes on under another number.
#
# ## A message that two receivers had at once
#
# By POP a broker hands messages out one by one. A message is one receiver's for the invisible time
# that its receive asked for; then, if it was not acknowledged, it is handed out again, as the next
# *attempt*. That is kept in the log, so a new leader knows it. Here a bug was planted: a new leader
# takes whatever is out for over. The leader was killed once.

# %%
of_pop = judge_run(POP, "local", time.monotonic)
(violation,) = [v for one in of_pop.verdicts for v in one.violations if one.checker == pop.NAME]
print(of_pop.verdict, "after", of_pop.operations, "operations")
print(f"{violation.name} in {violation.subject}: {violation.detail}")
print("proved by operations", violation.operations)
assert of_pop.verdict == "invalid"

# %% [markdown]
# All that receivers of this group did with the message. The two receives are the proof. The first
# one asked for `for s` seconds, which begin with its call at the earliest; the second one had its
# answer before that time was over, and no change of the time and no acknowledgement came between.

# %%
print(as_text(message_rows(received, violation)))
first, second, *_ = outs_of(received, violation)
print(f"\nattempt {first.attempt} lasts until {received.span.at_s(first.end_ns):.3f} s at least,")
print(f"attempt {second.attempt} had its answer at {received.span.at_s(second.known_ns):.3f} s")

# %%
shown(draw_message(received, violation))

# %% [markdown]
# Receiver 4 got and acknowledged the message while it was still receiver 3's. The leader was killed
# while the message was out, and the next one handed it out again. No clock of a broker takes part
# in the proof: the call of the first receive and the return of the second are times of the history.
# An acknowledged message that comes again is proved likewise, by the answer to its acknowledgement
# and a receive that was called after that.
#
# The faults around it, as rows:

# %%
begin_s, end_s = received.span.at_s(first.begin_ns), received.span.at_s(second.end_ns)
print(as_text(received.happened_between(begin_s - 5.0, end_s)))

# %% [markdown]
# ## A step that happened twice
#
# An exactly-once step reads messages, sends an output for each, and commits its offsets, all in one
# entry of the log: it is stored only where the group still stands at the offsets that the step
# began at. Here a bug was planted: of several queues only the first offset is compared.

# %%
of_steps = judge_run(STEPS, "local", time.monotonic)
(found,) = [one for one in of_steps.verdicts if one.checker == steps.NAME]
print(of_steps.verdict, "after", of_steps.operations, "operations")
print(as_text([
    {"violation": v.name, "where": v.subject, "what": v.detail, "operations": v.operations}
    for v in found.violations
]))  # fmt: skip
assert of_steps.verdict == "invalid"

# %% [markdown]
# The first one. Both steps were answered as stored, and began where the group stood once. After the
# first of them the group stood further on, so the second one had to be refused.

# %%
overlap = next(v for v in found.violations if v.name == steps.OVERLAP)
print(as_text(step_rows(stepped, overlap)))

# %% [markdown]
# When the run was over the outputs were read. Each message that both steps had has two of them: it
# was worked off twice. Nothing here depends on times.

# %%
print(as_text(output_rows(stepped, overlap)))

# %% [markdown]
# ## The same with Spark
#
# Tasks gather facts of the rows that they read, and the same kernel judges them. One digest: both
# found the same. Without Java 17 this is left out.

# %%
from dledger.spark_jobs.engines.session import why_no_java

if why_no_java() is None:
    again = judge_run(BROKEN, "spark", time.monotonic, master="local[2]")
    print("spark", again.verdict, again.digest == judged.digest)
    assert again.digest == judged.digest
else:
    print(why_no_java())
