// A part of the page that is loaded after the rest: not everybody opens a terminal or a display, scans a write
// cache, looks at a catalog or opens the screen of the server.

export { default as Advice } from "./Advice.svelte";
export { default as Contents } from "./Contents.svelte";
export { default as Display } from "./Display.svelte";
export { default as SerialConsole } from "./SerialConsole.svelte";
export { default as Server } from "./ServerScreen.svelte";
