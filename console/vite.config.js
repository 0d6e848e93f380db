// Builds the console into dist: five files with fixed names, which the daemon has in its program.

import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

export default defineConfig({
  plugins: [svelte()],
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
        // There is one of these, later.ts; what it shares with the rest is in app.js.
        chunkFileNames: "[name].js",
        assetFileNames: "app[extname]",
      },
    },
  },
});
