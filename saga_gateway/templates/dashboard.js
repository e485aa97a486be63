// Brings the sections of the page up to date every two seconds, while somebody can see them.
"use strict";
(() => {
  const EVERY_MS = 2000;
  const PATIENCE_MS = 10000;
  const main = document.getElementById("main");
  const status = document.getElementById("status");
  const button = document.getElementById("pause");
  let timer = 0;
  let asking = false;
  let paused = false;
  let count = 0;

  function say(words, bad) {
    const text = document.createElement("span");
    text.textContent = words;
    if (bad) text.className = "bad";
    // What has not changed is not read out again.
    if (status.textContent !== words) status.replaceChildren(text);
  }

  function isSelectedIn(element) {
    const selection = document.getSelection();
    return selection && !selection.isCollapsed && element.contains(selection.anchorNode);
  }

  // Where a table was scrolled to and what had the focus stays as it was.
  function replace(old, fresh) {
    const scrolled = [...old.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
    const focused = old.contains(document.activeElement) ? document.activeElement : null;
    const kind = focused && (focused.hasAttribute("href") ? "a[href]" : ".scroll");
    const place = focused ? [...old.querySelectorAll(kind)].indexOf(focused) : -1;
    const href = focused && focused.getAttribute("href");
    old.replaceWith(fresh);
    [...fresh.querySelectorAll(".scroll")].forEach((each, at) => {
      each.scrollLeft = scrolled[at] || 0;
    });
    if (focused) {
      const all = [...fresh.querySelectorAll(kind)];
      const same = href ? all.find((each) => each.getAttribute("href") === href) : all[place];
      if (same) same.focus({ preventScroll: true });
    }
  }

  function take(html) {
    const template = document.createElement("template");
    template.innerHTML = html; // All of it is escaped by the gateway; scripts in it would not run.
    for (const fresh of [...template.content.querySelectorAll("section[id]")]) {
      const old = document.getElementById(fresh.id);
      if (!old) {
        main.append(fresh);
      } else if (!old.isEqualNode(fresh) && !isSelectedIn(old)) {
        replace(old, fresh);
      }
    }
  }

  async function refresh() {
    if (asking) return;
    asking = true;
    const query = new URLSearchParams(location.search);
    query.set("fragment", "1");
    try {
      // Whole, and without a user and password, which a relative one would take from the page's.
      const answer = await fetch(`${location.origin}${location.pathname}?${query}`, {
        cache: "no-store",
        signal: AbortSignal.timeout(PATIENCE_MS),
      });
      if (answer.ok) {
        take(await answer.text());
        main.dataset.refreshed = String(++count);
        say("Live");
      } else {
        say(answer.status === 404 ? "Gone" : `Refused (${answer.status}): reload the page`, true);
      }
    } catch {
      say("The gateway does not answer", true);
    } finally {
      asking = false;
      schedule();
    }
  }

  function schedule() {
    clearTimeout(timer);
    if (!paused && !document.hidden) timer = setTimeout(refresh, EVERY_MS);
  }

  button.addEventListener("click", () => {
    paused = !paused;
    button.textContent = paused ? "Go on" : "Pause";
    if (paused) {
      clearTimeout(timer);
      say("Paused");
    } else {
      refresh();
    }
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) clearTimeout(timer);
    else if (!paused) refresh();
  });
  button.hidden = false;
  say("Live");
  schedule();
})();
