// The response to a request that depends on the state. Whenever the request changes, the new request is sent.
import { untrack } from "svelte";
import { request, type ApiRequest } from "./api";
import { app } from "./state.svelte";

export class Resource<T> {
  data = $state.raw<T | null>(null);
  error = $state("");
  busy = $state(false);
  /** The request whose response is `data`. This is not the current request if the current request is still pending. */
  source = $state.raw<ApiRequest | null>(null);
  #last: ApiRequest | null = null;

  /** If `isExported` is true, exports of the open view include this response. */
  constructor(buildRequest: () => ApiRequest | null, isExported = true) {
    $effect(() => {
      const current = buildRequest();
      // Do not show old values next to new tokens.
      if (!current || !this.#last || this.#last.path !== current.path || this.#last.body?.run !== current.body?.run) {
        this.data = null;
      }
      this.#last = current;
      this.error = "";
      this.busy = current !== null;
      if (!current) return;
      const controller = new AbortController();
      if (isExported) app.requests = [...untrack(() => app.requests), current];
      request<T>(current.path, current.body, controller.signal).then(
        (data) => {
          if (controller.signal.aborted) return;
          this.data = data;
          this.source = current;
          this.busy = false;
        },
        (error: Error) => {
          if (controller.signal.aborted) return;
          this.data = null;
          this.error = error.message;
          this.busy = false;
        },
      );
      return () => {
        controller.abort();
        if (isExported) app.requests = untrack(() => app.requests).filter((item) => item !== current);
      };
    });
  }
}
