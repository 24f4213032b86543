// Starts the page: connects the events to the dashboard, again and again if need be; key and views.

import { call, events, key } from "./api.js";
import * as chat from "./chat.js";
import { byId, setText } from "./dom.js";
import { Dashboard } from "./engine.js";

const RETRY_SECONDS = 2;
const STATES = {
  ready: "ready",
  recovering: "recovering",
  draining: "draining",
  engine_unavailable: "engine unavailable",
  engine_unresponsive: "engine unresponsive",
};

const dashboard = new Dashboard();
let wake = () => {}; // ends the pause before the next attempt

function setState(state, text = STATES[state] ?? state) {
  byId("state").dataset.state = state;
  setText(byId("state"), text);
}

function notice(text) {
  byId("notice").hidden = !text;
  setText(byId("notice"), text);
}

function askForKey(message) {
  setText(byId("key-hint"), message);
  byId("key-panel").open = true;
  byId("key").focus();
}

async function follow() {
  const response = await call("/console/events");
  for await (const { event, data } of events(response)) {
    const value = JSON.parse(data);
    if (event === "engine") {
      chat.setModel(value.model);
      setText(byId("model-name"), value.model);
      document.title = `${value.model} – tokenmill`;
      dashboard.setEngine(value);
    } else if (event === "history") {
      dashboard.setHistory(value);
    } else if (event === "snapshot") {
      setState(value.sample.state);
      notice(value.sample.message);
      dashboard.take(value);
    }
  }
}

async function connect() {
  for (;;) {
    try {
      await follow();
      setState("offline");
      notice("The server has ended the connection.");
    } catch (error) {
      const locked = error.status === 401 || error.status === 403;
      setState(locked ? "locked" : "offline", locked ? "key needed" : "offline");
      notice(error.status ? error.message : "The server cannot be reached.");
      if (locked) askForKey(error.message);
    }
    await new Promise((resolve) => {
      wake = resolve;
      if (byId("state").dataset.state !== "locked") setTimeout(resolve, RETRY_SECONDS * 1000);
    });
  }
}

byId("key").value = key.get();
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(byId("key").value.trim());
  byId("key-panel").open = false;
  wake();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && byId("key-panel").open) {
    byId("key-panel").open = false;
    byId("key-panel").firstElementChild.focus();
  }
});

const views = document.querySelectorAll(".views button");
views.forEach((button) =>
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.view;
    views.forEach((each) => each.setAttribute("aria-pressed", each === button));
  }),
);

chat.start(askForKey);
connect();
