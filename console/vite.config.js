// Builds the console into dist: six files with fixed names, which the daemon has in its program.

import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

const NOTICE = "/*! noVNC 1.7.0, https://github.com/novnc/noVNC: MPL-2.0, (c) the noVNC authors; with pako: MIT, (c) Vitaly Puzrin and Andrei Tuputcyn */";

/**
 * Two answers of noVNC about the browser, given ahead:
 * - It shows the pointers of guests by `data:` URLs, which the policy of the page refuses. It has another way for browsers without them.
 * - It asks whether the browser decodes H.264, and everything waits for that. QEMU does not send it.
 */
const ANSWERS = {
  "supportsCursorURIs = _supportsCursorURIs": "supportsCursorURIs = false",
  "supportsWebCodecsH264Decode = await _checkWebCodecsH264DecodeSupport()": "supportsWebCodecsH264Decode = false",
};
const answers = {
  name: "answers-about-the-browser",
  transform(code, id) {
    if (!id.endsWith("/novnc/core/util/browser.js")) return null;
    for (const [question, answer] of Object.entries(ANSWERS)) {
      if (!code.includes(question)) throw new Error(`${id} is not as expected: it has no '${question}'`);
      code = code.replace(question, answer);
    }
    return code;
  },
};

export default defineConfig({
  plugins: [svelte(), answers],
  build: {
    target: "es2023",
    // The first browsers that know light-dark().
    cssTarget: ["chrome123", "firefox120", "safari17.5"],
    // The policy of the page refuses inline scripts.
    modulePreload: false,
    assetsInlineLimit: 0,
    cssCodeSplit: false,
    rollupOptions: {
      output: {
        entryFileNames: "app.js",
        // There are two of these, later.ts and display.ts; what they share with the rest is in app.js.
        chunkFileNames: "[name].js",
        assetFileNames: "app[extname]",
        postBanner: (chunk) => (chunk.name === "display" ? NOTICE : ""),
      },
    },
  },
});
