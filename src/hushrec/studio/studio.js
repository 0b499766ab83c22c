"use strict";
// Parts of a page that change are fetched again and put in place; all words come from the server.
const WAIT = 1000;

async function fetchPart(target, url) {
  const answer = await fetch(url, { headers: { Accept: "text/html" }, credentials: "same-origin" });
  const text = await answer.text();
  if (text !== target.dataset.shown) {
    target.dataset.shown = text;
    target.innerHTML = text;
  }
}

// <div data-live="URL">: again and again, as long as the part says that something is going on.
async function follow(target) {
  while (target.querySelector("[data-going-on]")) {
    await new Promise(done => setTimeout(done, WAIT));
    try {
      await fetchPart(target, target.dataset.live);
      target.removeAttribute("data-lost");
    } catch {
      target.dataset.lost = "";
    }
  }
  if (target.dataset.then) location.assign(target.dataset.then);
}
document.querySelectorAll("[data-live]").forEach(target => {
  if (target.querySelector("[data-going-on]")) follow(target);
});

// <form data-into="#id">: asked again when something in it is moved, the last move counts.
document.querySelectorAll("form[data-into]").forEach(form => {
  const target = document.querySelector(form.dataset.into);
  let asked = false, again = false;
  form.addEventListener("input", async () => {
    again = true;
    if (asked) return;
    asked = true;
    while (again) {
      again = false;
      const query = new URLSearchParams(new FormData(form));
      history.replaceState(null, "", "?" + query);
      query.set("part", "1");
      try {
        await fetchPart(target, form.getAttribute("action") + "?" + query);
        delete target.dataset.lost;
      } catch {
        target.dataset.lost = "";
      }
      for (const said of target.querySelectorAll("[data-value-of]")) {
        const slider = form.elements[said.dataset.valueOf];
        slider.setAttribute("aria-valuetext", said.textContent);
        form.querySelector(`output[for="${slider.id}"]`).textContent = said.textContent;
      }
    }
    asked = false;
  });
});
