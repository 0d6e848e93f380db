// noVNC, which draws displays: a file of its own, loaded when a display is opened.

export { default as RFB } from "@novnc/novnc";
