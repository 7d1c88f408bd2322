/* SPDX-License-Identifier: Apache-2.0
 *
 * Search on pages that are opened as files: browsers start no workers there, so the script of a worker runs in a frame of
 * the page. The theme looks for the name IFrameWorker to find its files. */
"use strict";
if (location.protocol === "file:") {
    window.IFrameWorker = class extends EventTarget {
        constructor(url) {
            super();
            const frame = document.createElement("iframe");
            frame.hidden = true;
            document.body.append(frame);
            const inside = frame.contentWindow;
            inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
            inside.importScripts = (...names) =>
                names.reduce((before, name) => before.then(() => load(inside, name)), Promise.resolve());
            this.ready = load(inside, new URL(url, document.baseURI)).then(() => inside);
        }

        postMessage(data) {
            this.ready.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
        }

        terminate() {}
    };
    window.Worker = window.IFrameWorker;
}

/* Runs a script in the frame; resolves when it has run. */
function load(inside, url) {
    return new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = reject;
        inside.document.body.append(script);
    });
}
