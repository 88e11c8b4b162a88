// The dashboard's page: the stream updates the state, and changed sections are drawn at most once per frame.

import { Chart } from "./chart.js";
import { byId, mark, say, show } from "./dom.js";
import { Events } from "./events.js";
import { Groups } from "./groups.js";
import { Heals } from "./heals.js";
import { LogIn, Orders } from "./orders.js";
import { State } from "./state.js";
import { Status } from "./status.js";
import { Stream } from "./stream.js";

const REDRAW_MS = 1000; // interval of redraws of ages and of the time axis

const state = new State();
const logIn = new LogIn(start);
const orders = new Orders(state, logIn);
const parts = [new Status(state), new Chart(state, byId("chart")), new Heals(state), new Groups(state, orders), new Events(state)];
const changed = new Set();
let stream = null;
let asked = false;

function start() {
  stream?.close();
  stream = new Stream({
    token: () => logIn.token,
    hear(update) {
      for (const section of state.apply(update)) changed.add(section);
      draw();
    },
    state(words, kind) {
      say(byId("connection"), words);
      mark(byId("connection"), "state", kind);
      document.body.classList.toggle("stale", kind === "bad");
      if (kind === "good") logIn.works();
    },
    refuse() {
      say(byId("connection"), "log in");
      state.clear();
      for (const section of ["names", "rows", "job", "heals", "points", "events"]) changed.add(section);
      draw();
      logIn.ask();
    },
  });
  void stream.run();
}

function draw() {
  if (asked) return;
  asked = true;
  // setTimeout for a hidden tab, which gets no animation frames: its title is kept up to date
  (document.hidden ? (then) => setTimeout(then, 500) : requestAnimationFrame)(() => {
    asked = false;
    for (const part of parts) part.draw(changed);
    changed.clear();
  });
}

byId("log-out").addEventListener("click", () => {
  logIn.forget();
  start();
});
setInterval(() => {
  changed.add("time");
  draw();
}, REDRAW_MS);
show(byId("log-out"), Boolean(logIn.token));
start();
