// Serves console/dist with the headers of the daemon, and answers of a scenario.

import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { display, png } from "./screen.mjs";

const DIST = new URL("../dist/", import.meta.url);
const TYPES = { html: "text/html; charset=utf-8", js: "text/javascript; charset=utf-8", css: "text/css; charset=utf-8", svg: "image/svg+xml" };

/** So many machines have 200 KB. */
const PAGE = 180;

const PICTURE = png();

/** The policy of the page, as the daemon's source has it. */
function policy() {
  const source = readFileSync(new URL("../../control/service/src/web/mod.rs", import.meta.url), "utf8");
  const [, text] = /CONTENT_SECURITY_POLICY: &str = "([^"]+)"/.exec(source) ?? [];
  if (!text) throw new Error("the policy of the page is not found in control/service/src/web/mod.rs");
  return text.replace(/\\\n\s*/g, "");
}

/** A server whose `scenario` is changed by the tests. */
export async function serve() {
  const csp = policy();
  const state = { answers: {}, role: "admin", fail: {}, silent: new Set(), isGone: false, keys: [], refusal: null };
  const open = new Set();
  const server = createServer((request, response) => {
    const url = new URL(request.url, "http://localhost");
    const path = url.pathname;
    const file = path === "/" ? "index.html" : path.slice(1);
    if (/^[a-z]+\.(html|js|css|svg)$/.test(file)) {
      const headers = { "content-type": TYPES[file.split(".")[1]], "content-security-policy": csp, "cache-control": "no-store" };
      response.writeHead(200, headers).end(readFileSync(new URL(file, DIST)));
      return;
    }
    if (state.isGone) return void request.socket.destroy();
    const json = (value, status = 200) => response.writeHead(status, { "content-type": "application/json" }).end(JSON.stringify(value));
    const kind = path.startsWith("/api/v1/") ? path.split("/")[3] : path.slice(1);
    if (state.silent.has(kind)) return void open.add(response);
    if (state.fail[kind]) return json(state.fail[kind], 500);
    const { answers } = state;
    const name = decodeURIComponent(path.split("/")[4] ?? "");
    switch (kind) {
      case "session":
        return json({ secret: "hws_test", principal: "console of uid 1000 (anna)", role: state.role });
      case "login":
        return json(answers.login ?? {});
      case "status":
        return json(answers.status);
      case "events": {
        // Nothing happens while a test looks.
        if (url.searchParams.has("wait_s")) {
          open.add(response);
          response.on("close", () => open.delete(response));
          return;
        }
        const subject = url.searchParams.get("subject");
        return json({ events: answers.events.filter((event) => !subject || event.subject === subject) });
      }
      case "machines": {
        if (path.endsWith("/console/ticket")) return json({ ticket: "hwc_test", expires_at_ms: 0 }, 201);
        if (path.endsWith("/display/ticket")) return state.fail.display ? json(state.fail.display, 409) : json({ ticket: "hwd_test", expires_at_ms: 0 }, 201);
        if (path.endsWith("/screenshot")) return void response.writeHead(200, { "content-type": "image/png" }).end(PICTURE);
        if (path.endsWith("/console")) return void response.writeHead(200, { "content-type": "text/plain" }).end(answers.console);
        if (path.endsWith("/cache/contents")) {
          if (state.silent.has("contents")) return void open.add(response);
          return state.fail.contents ? json(state.fail.contents, 409) : json(answers.contents);
        }
        if (name) return json(answers.machines.find((machine) => machine.name === name));
        const filter = url.searchParams.get("filter") ?? "";
        if (filter.includes("state:odd")) return json({ kind: "invalid", message: "cannot read the filter 'state:odd': there is no state 'odd'", advice: "" }, 400);
        const machines = answers.machines.filter((machine) => !filter || machine.name.includes(filter));
        // As the daemon: pages of 200 KB.
        const from = Number(url.searchParams.get("after") ?? 0);
        const page = machines.slice(from, from + PAGE);
        const next = from + PAGE < machines.length ? { next: String(from + PAGE) } : {};
        return json({ total: answers.machines.length, matching: machines.length, machines: page, ...next });
      }
      case "images":
        return json(answers.images);
      case "catalogs":
        if (path.endsWith("/advice")) return state.fail.advice ? json(state.fail.advice, 500) : json(answers.advice);
        return json({ catalogs: answers.catalogs });
      case "tasks": {
        const isUnended = url.searchParams.get("unended") === "true";
        return json({ tasks: answers.tasks.filter((task) => !isUnended || ["waiting", "running"].includes(task.state)) });
      }
      case "tokens":
        if (request.method === "POST") return json({ ...answers.tokens[1], name: "anna", secret: `hwt_${"7c".repeat(32)}` }, 201);
        return json({ tokens: answers.tokens });
      default:
        return json({ kind: "not_found", message: `the daemon has no operation at ${path}` }, 404);
    }
  });
  server.on("upgrade", (request, socket) => (request.url === "/display" ? display(request, socket, state) : socket.destroy()));
  await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
  const hangUp = () => {
    for (const response of open) response.destroy();
    open.clear();
  };
  const close = () => {
    hangUp();
    server.closeAllConnections();
    server.close();
  };
  return { state, hangUp, close, waiting: () => open.size, url: `http://127.0.0.1:${server.address().port}/` };
}
