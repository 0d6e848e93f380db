// Svelte: class names of styles that depend on no path, so that each folder builds the same bytes.

export default {
  compilerOptions: {
    runes: true,
    cssHash: ({ hash, css }) => `c${hash(css)}`,
  },
};
