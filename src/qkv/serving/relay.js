// Between a notebook and the page: the page asks by postMessage, Python answers by the widget's channel.
export default {
  render({ model, el }) {
    const frame = document.createElement("iframe");
    frame.setAttribute("sandbox", "allow-scripts allow-downloads");
    frame.title = "qkv explorer";
    frame.style.width = "100%";
    frame.style.height = `${model.get("height")}px`;
    frame.style.border = "0";
    frame.srcdoc = model.get("html");
    const ask = (event) => {
      if (event.source === frame.contentWindow && event.data && event.data.qkv !== undefined) model.send(event.data);
    };
    const answer = (message, buffers) => {
      const { buffer, byteOffset, byteLength } = buffers[0];
      const bytes = buffer.slice(byteOffset, byteOffset + byteLength);
      frame.contentWindow?.postMessage({ ...message, answer: bytes }, "*");
    };
    window.addEventListener("message", ask);
    model.on("msg:custom", answer);
    el.append(frame);
    return () => {
      window.removeEventListener("message", ask);
      model.off("msg:custom", answer);
    };
  },
};
