// The part of noVNC that the console uses.

declare module "@novnc/novnc" {
  export default class RFB extends EventTarget {
    constructor(target: HTMLElement, channel: WebSocket, options?: { shared?: boolean });
    scaleViewport: boolean;
    showDotCursor: boolean;
    viewOnly: boolean;
    background: string;
    focus(): void;
    blur(): void;
    disconnect(): void;
    sendCtrlAltDel(): void;
    sendKey(keysym: number, code: string | null, down?: boolean): void;
  }
}
