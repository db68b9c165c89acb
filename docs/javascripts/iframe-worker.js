// Browsers start no worker from a file. In a page that is read from a folder, the theme's search therefore runs in a hidden
// frame, which has what the theme uses of a worker: messages to it and from it. The theme's `offline` plugin would have the
// page fetch such a script from the network, unless one with "iframe-worker" in its name is there.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = this.inside.document.createElement("script")
      this.loaded = new Promise(resolve => (script.onload = resolve))
      script.src = url
      this.inside.document.head.append(script)
    }

    async postMessage(data) {
      await this.loaded
      this.inside.dispatchEvent(new MessageEvent("message", { data }))
    }
  }
}
