// Entry point of the page.
import { mount } from "svelte";
import "./page.css";
import Page from "./Page.svelte";

mount(Page, { target: document.getElementById("page")! });
