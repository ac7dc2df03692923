// An answer that follows the state: asked again whenever what is asked for changes.
import { untrack } from "svelte";
import { ask, type Asked } from "./ask";
import { shown } from "./state.svelte";

export class Answer<T> {
  data = $state.raw<T | null>(null);
  error = $state("");
  busy = $state(false);
  /** What `data` answers; while another answer is on its way, this still names the one that is here. */
  of = $state.raw<Asked | null>(null);
  #last: Asked | null = null;

  /** `counts`: an export of the view that is open writes this answer. */
  constructor(want: () => Asked | null, counts = true) {
    $effect(() => {
      const asked = want();
      // Old numbers must not stand beside new tokens.
      if (!asked || !this.#last || this.#last.path !== asked.path || this.#last.body?.run !== asked.body?.run) {
        this.data = null;
      }
      this.#last = asked;
      this.error = "";
      this.busy = asked !== null;
      if (!asked) return;
      const stop = new AbortController();
      if (counts) shown.requests = [...untrack(() => shown.requests), asked];
      ask<T>(asked.path, asked.body, stop.signal).then(
        (data) => {
          if (stop.signal.aborted) return;
          this.data = data;
          this.of = asked;
          this.busy = false;
        },
        (error: Error) => {
          if (stop.signal.aborted) return;
          this.data = null;
          this.error = error.message;
          this.busy = false;
        },
      );
      return () => {
        stop.abort();
        if (counts) shown.requests = untrack(() => shown.requests).filter((one) => one !== asked);
      };
    });
  }
}
