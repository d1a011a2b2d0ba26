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
  const DAY_MS = 86400000;
  const SHELF = "pictures";
  const pictures = new Map(); // data URLs by id; the browser's database keeps them when the page is loaded again
  const database = new Promise((resolve) => {
    const asked = indexedDB.open("samewise", 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(SHELF);
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => resolve(null); // some private windows have none
  });
  let numPictures = 0;

  async function onShelf(mode, work) {
    // The result of a request to the database; undefined if it fails, as when it is full.
    const opened = await database;
    if (!opened) return undefined;
    return new Promise((resolve) => {
      const asked = work(opened.transaction(SHELF, mode).objectStore(SHELF));
      asked.onsuccess = () => resolve(asked.result);
      asked.onerror = () => resolve(undefined);
    });
  }

  async function pictureOf(id) {
    if (!pictures.has(id)) {
      const kept = await onShelf("readonly", (shelf) => shelf.get(id));
      if (kept) pictures.set(id, kept);
    }
    return pictures.get(id);
  }

  function removePicture(id) {
    pictures.delete(id);
    onShelf("readwrite", (shelf) => shelf.delete(id));
  }

  async function sweepPictures(gone = "") {
    // Removes the pictures in the text of a conversation that is gone, and old ones that no conversation has.
    const texts = Object.keys(localStorage)
      .filter((key) => key.startsWith(CONVERSATION))
      .map((key) => localStorage.getItem(key));
    for (const id of (await onShelf("readonly", (shelf) => shelf.getAllKeys())) || []) {
      const isOld = Number(id.split("-")[0]) < Date.now() - DAY_MS; // newer ones may not have been sent yet
      if ((isOld || gone.includes(id)) && !texts.some((text) => text.includes(id))) removePicture(id);
    }
  }

  function sendPicture(id, name, url, send) {
    for (let at = 0; at < Math.max(url.length, 1); at += SENT) {
      send(id, name, url.slice(at, at + SENT), at + SENT >= url.length);
    }
  }

  async function sendKept(ids, send) {
    for (const id of ids) sendPicture(id, "", (await pictureOf(id)) || "", send);
  }

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
        onShelf("readwrite", (shelf) => shelf.put(url, id));
        sendPicture(id, file.name || "image", url, send);
      };
      reader.readAsDataURL(file);
    }
    if (event.type === "change") event.target.value = ""; // so that the same file can be chosen again
  }

  async function showPicture(element, id, tries = 20) {
    const url = await pictureOf(id);
    const image = getHtmlElement(element);
    if (image && url) image.src = url;
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
    begin() {
      sweepPictures();
      return {
        conversations: conversations(),
        key: sessionStorage.getItem(KEY) || "",
        current: sessionStorage.getItem(CURRENT),
        theme: stored("theme"),
        settings: stored("settings"),
        system: stored("system"),
      };
    },
    load(id, from = 0) {
      const text = localStorage.getItem(CONVERSATION + id);
      if (text === null) return null;
      const isHalf = /[\uD800-\uDBFF]/.test(text[from + PIECE - 1]); // do not split a surrogate pair
      return text.slice(from, from + PIECE - (isHalf ? 1 : 0));
    },
    save: (id, text) => keep(CONVERSATION + id, text),
    remove(id) {
      const gone = localStorage.getItem(CONVERSATION + id);
      localStorage.removeItem(CONVERSATION + id);
      sweepPictures(gone || "");
    },
    remember: (name, value) => keep(`samewise.${name}`, JSON.stringify(value)),
    rememberKey: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
    setCurrent: (id) => sessionStorage.setItem(CURRENT, id),
    readPictures,
    showPicture,
    removePicture,
    sendKept,
    askForPictures: (element, ids) => getHtmlElement(element)?.dispatchEvent(new CustomEvent("wanted", { detail: ids })),
    toEnd: () => document.querySelector(".log")?.dispatchEvent(new Event("toend")),
  };
})();
