// The headline of the job, its reason, and the main metrics.

import { byId, make, mark, say, show } from "./dom.js";
import { clock, duration, lossText, many, pace, percent, whole } from "./format.js";
import { GLYPHS } from "./glyphs.js";

const FIGURES = ["Step", "Loss", "Quorum", "Groups", "Pace", "Goodput"];

export class Status {
  #told = "";

  constructor(state) {
    this.state = state;
    this.values = FIGURES.map((name) => {
      const value = make("dd"), hint = make("dd", { class: "hint" });
      byId("figures").append(make("div", {}, make("dt", {}, name), value, hint));
      return [value, hint];
    });
  }

  draw(changed) {
    if (!["job", "points", "begin", "time"].some((section) => changed.has(section))) return;
    const { job } = this.state;
    if (!job) return this.#nothing();
    say(byId("headline"), job.headline);
    mark(byId("headline"), "state", job.state);
    say(byId("reason"), job.reason);
    say(byId("trouble"), job.trouble ? `The state file: ${job.trouble}` : "");
    show(byId("trouble"), Boolean(job.trouble));
    document.title = `${job.headline} · ${whole(job.step)} · Pharos`;
    if (job.headline.replace(/\d+/g, "") !== this.#told) {
      this.#told = job.headline.replace(/\d+/g, ""); // a change of seconds only is not read out
      say(byId("live"), `${job.headline}. ${job.reason}`);
    }
    const last = this.state.points.at(-1);
    const since = job.since_s ? `for ${duration(this.state.now() - job.since_s)}, since ${clock(job.since_s)}` : "none yet";
    const figures = [
      [whole(job.step), `settled: ${whole(job.settled)}${job.branch ? ` of branch ${job.branch}` : ""}`],
      [last ? lossText(last[2]) : "–", last ? `nats per token, step ${whole(last[1])}` : "not reported yet"],
      [job.quorum_id ? `#${job.quorum_id}` : "–", job.kind === "pharos" ? since : `${since}; torchft groups`],
      [job.alive < job.members ? `${whole(job.alive)} of ${whole(job.members)}` : whole(job.members), `at least ${whole(job.min_replicas)}; ${many(job.asking, "waits", "wait")} for a quorum`],
      [pace(job.steps_per_s), "over the last minute, at least two steps"],
      [percent(job.goodput), "of the time in committed steps"],
    ];
    figures.forEach(([value, hint], place) => {
      say(this.values[place][0], value);
      say(this.values[place][1], hint);
    });
    this.#counts(job.counts);
  }

  #counts(counts) {
    const words = this.state.constants.health;
    const items = counts.map((count, health) => [count, words[health]]).filter(([count]) => count);
    const text = items.map(([count, word]) => `${count} ${word}`).join();
    if (byId("counts").dataset.text === text) return;
    mark(byId("counts"), "text", text);
    byId("counts").replaceChildren(
      ...items.map(([count, word]) =>
        make("li", { "data-health": word }, make("span", { class: "glyph", "aria-hidden": "true" }, GLYPHS[word] ?? "?"), `${whole(count)} ${word}`),
      ),
    );
  }

  #nothing() {
    say(byId("headline"), "Not connected");
    say(byId("reason"), "");
    byId("counts").replaceChildren();
    delete byId("counts").dataset.text;
    for (const [value, hint] of this.values) {
      say(value, "–");
      say(hint, "");
    }
  }
}
