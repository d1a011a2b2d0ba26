// The browser's part of the page: stores conversations, copies code, and scrolls with a growing answer.
window.samewise = (() => {
  const CONVERSATION = "samewise.conversation.";
  const KEY = "samewise.key";
  const CURRENT = "samewise.current";

  const PIECE = 200000; // characters sent at once: a message has at most a million
  const MOST_LISTED = 200; // conversations in an event, whose size is limited
  const TITLE_LENGTH = 100;

  function stored(name) {
    try {
      return JSON.parse(localStorage.getItem(`samewise.${name}`));
    } catch {
      return null;
    }
  }

  function conversations() {
    const found = [];
    for (const key of Object.keys(localStorage)) {
      if (!key.startsWith(CONVERSATION)) continue;
      try {
        const { id, title, updated } = JSON.parse(localStorage.getItem(key));
        if (key === CONVERSATION + id) found.push({ id, title: String(title || "").slice(0, TITLE_LENGTH), updated: Number(updated) || 0 });
      } catch {
        continue; // not ours, or from an incompatible version
      }
    }
    return found.sort((a, b) => b.updated - a.updated);
  }

  function keep(key, text) {
    try {
      localStorage.setItem(key, text);
      return true;
    } catch {
      return false; // the storage is full
    }
  }

  function follow() {
    // Keeps the end of the log visible unless the user has scrolled up.
    const log = document.querySelector(".log");
    if (!log || log.dataset.followed) return;
    log.dataset.followed = "yes";
    let atEnd = true;
    log.addEventListener("scroll", () => (atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40), {
      passive: true,
    });
    new ResizeObserver(() => atEnd && (log.scrollTop = log.scrollHeight)).observe(log.firstElementChild);
    log.addEventListener("toend", () => {
      atEnd = true;
      log.scrollTop = log.scrollHeight;
    });
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button.copy");
    if (!button) return;
    const text = button.closest("figure").querySelector("pre").textContent;
    button.textContent = (await copy(text)) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });

  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // Without HTTPS the clipboard API is not available.
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      return done;
    }
  }

  const SENT = 500000; // characters of a picture sent at once
  const pictures = new Map(); // data URLs by id, until the page is loaded again
  let numPictures = 0;

  function readPictures(event, send) {
    // Sends the files that were chosen, pasted or dropped: their own bytes, unchanged.
    const source = event.clipboardData || event.dataTransfer || event.target;
    const files = [...(source.files || [])].filter((file) => file.type.startsWith("image/"));
    if (files.length === 0) return;
    if (event.type !== "change") event.preventDefault();
    for (const file of files) {
      const id = `${Date.now()}-${numPictures++}`;
      const reader = new FileReader();
      reader.onload = () => {
        const url = reader.result;
        pictures.set(id, url);
        for (let at = 0; at < url.length; at += SENT) {
          send(id, file.name || "image", url.slice(at, at + SENT), at + SENT >= url.length);
        }
      };
      reader.readAsDataURL(file);
    }
    if (event.type === "change") event.target.value = ""; // so that the same file can be chosen again
  }

  function showPicture(element, id, tries = 20) {
    const image = getHtmlElement(element);
    if (image && pictures.has(id)) image.src = pictures.get(id);
    else if (!image && tries) requestAnimationFrame(() => showPicture(element, id, tries - 1));
  }

  function emit(event, ...said) {
    window.emitEvent?.(event, ...said); // undefined until the page is loaded
  }

  window.addEventListener("storage", (event) => {
    if (event.key !== null && !event.key.startsWith(CONVERSATION)) return;
    emit("conversations", conversations().slice(0, MOST_LISTED), event.key && event.key.slice(CONVERSATION.length));
  });

  document.addEventListener("visibilitychange", () => emit("visibility", document.visibilityState));

  return {
    copy,
    follow,
    conversations,
    begin: () => ({
      conversations: conversations(),
      key: sessionStorage.getItem(KEY) || "",
      current: sessionStorage.getItem(CURRENT),
      theme: stored("theme"),
      settings: stored("settings"),
      system: stored("system"),
    }),
    load(id, from = 0) {
      const text = localStorage.getItem(CONVERSATION + id);
      if (text === null) return null;
      const isHalf = /[\uD800-\uDBFF]/.test(text[from + PIECE - 1]); // do not split a surrogate pair
      return text.slice(from, from + PIECE - (isHalf ? 1 : 0));
    },
    save: (id, text) => keep(CONVERSATION + id, text),
    remove: (id) => localStorage.removeItem(CONVERSATION + id),
    remember: (name, value) => keep(`samewise.${name}`, JSON.stringify(value)),
    rememberKey: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
    setCurrent: (id) => sessionStorage.setItem(CURRENT, id),
    readPictures,
    showPicture,
    toEnd: () => document.querySelector(".log")?.dispatchEvent(new Event("toend")),
  };
})();
