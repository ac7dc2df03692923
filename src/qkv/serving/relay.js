// Notebook widget: shows the page in an iframe and relays its requests, sent by postMessage, to Python.
export default {
  render({ model, el }) {
    const frame = document.createElement("iframe");
    frame.setAttribute("sandbox", "allow-scripts allow-downloads");
    frame.title = "qkv explorer";
    frame.style.width = "100%";
    frame.style.height = `${model.get("height")}px`;
    frame.style.border = "0";
    frame.srcdoc = model.get("html");
    const forwardRequest = (event) => {
      if (event.source === frame.contentWindow && event.data && event.data.qkv !== undefined) model.send(event.data);
    };
    const forwardResponse = (message, buffers) => {
      const { buffer, byteOffset, byteLength } = buffers[0];
      const bytes = buffer.slice(byteOffset, byteOffset + byteLength);
      frame.contentWindow?.postMessage({ ...message, response: bytes }, "*");
    };
    window.addEventListener("message", forwardRequest);
    model.on("msg:custom", forwardResponse);
    el.append(frame);
    return () => {
      window.removeEventListener("message", forwardRequest);
      model.off("msg:custom", forwardResponse);
    };
  },
};
