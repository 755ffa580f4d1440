// Keeps the moving part of a page new. Without it the page reloads itself.
(() => {
  const part = document.getElementById("live");
  if (!part) return;
  const note = document.getElementById("live-note");
  const refresh = async () => {
    try {
      const answer = await fetch(part.dataset.from, { credentials: "same-origin" });
      if (!answer.ok) throw new Error(answer.status);
      const text = await answer.text();
      // A form that a user is about to send stays as it is.
      if (!part.contains(document.activeElement) && !part.querySelector("details[open]")) {
        part.innerHTML = text;
      }
      part.dataset.looks = String(Number(part.dataset.looks || 0) + 1);
      note.hidden = true;
    } catch {
      note.hidden = false;
    }
    setTimeout(refresh, 2000);
  };
  setTimeout(refresh, 2000);
})();
