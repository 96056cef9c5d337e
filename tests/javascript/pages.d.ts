// What the API answers (nodepool/web/v1.py), and other types of the scripts of the pages.

type Json = string | number | boolean | null | Json[] | { [key: string]: Json };
type Row = { [key: string]: Json };
type Counts = { [name: string]: number };
type Child = Node | string | number | null | undefined | false | Child[];
type Attributes = { [name: string]: string | number | boolean | null | undefined | ((event: any) => unknown) };
type Changes = { [kind: string]: unknown };
type Load = () => Promise<unknown>;
type View = { main: HTMLElement; onStop: (ends: () => void) => void; failed: (error: unknown) => void };
/** An error of the API; without a status there was no answer. */
type Failure = Error & { status?: number; code?: string };

type Column = { key: string; title: string; type?: string | null };
type Table = {
  columns: Column[]; more: Column[]; order: string[]; rows: Row[]; total: number; choices: { [key: string]: string[] }; groups: [string, number][];
};

type Trouble = { level: Level; text: string; kind: string; name: string };
type Level = "green" | "amber" | "red";
type Health = { level: Level; word: string; problems: Trouble[]; more: number };
type CauseRow = {
  key: string; cause: string; count: number; label_counts: Counts; tenants: Counts; ids: string[]; oldest: number; reason: string; suggestion: string; problem: boolean;
};
type Provider = {
  provider: string; launcher: string | null; driver: string | null; nodes: string; states: Counts; used: Counts; limit: Counts; hosts: number; hosts_down: number;
  problems: number;
};
type MergedProvider = Provider & { launchers: (string | null)[] };
type Pool = { provider: string; pool: string; launcher: string; paused: boolean; full: string | null; nodes: number; max_servers: number | null };
type Label = { label: string; states: Counts; min_ready: number; waiting: number };
type Overview = {
  health: Health; nodes: Counts; requests: Counts; launches: { ready: number; failed: number }; waiting: CauseRow[]; providers: Provider[]; pools: Pool[]; labels: Label[];
  problems: Row[]; daemons: Row[];
};

type Values = (number | null)[];
type Trends = {
  time: number[]; ready: Values; failed: Values; launch: Values; wait: Values; wait_p95: Values; nodes: { [state: string]: Values }; waiting: { [cause: string]: Values };
  sampled: boolean[];
};
type UsageRow = { [key: string]: string | number | null };
type Usage = { by: string; groups: string[]; rows: UsageRow[] };
type Series = { name: string; values: Values; color: string; dash?: number[] };
type Chart = { title: string; stacked?: boolean; bars?: boolean; format: (value: number | null | undefined) => string; nothing: string; series: Series[] };
/** What the pages use of uPlot. */
type Plot = { destroy(): void; setLegend(shown: { idx: number }): void };
type Axis = { stroke: string; grid: object; ticks: object; size?: number; incrs?: number[]; values: (plot: Plot, ticks: number[]) => string[] };
type PlotSeries = {
  label: string; stroke?: string; width?: number; dash?: number[]; fill?: string; paths?: unknown; points?: object;
  value: (plot: Plot, value: number | null, series: number, index: number | null) => string;
};
type PlotOptions = {
  width: number; height: number; cursor: object; legend: object; hooks: { ready: ((plot: Plot) => void)[] }; axes: Axis[];
  scales: { x: object; y: { range: (plot: Plot, low: number | null, high: number) => [number, number] } };
  series: PlotSeries[];
};
type PlotLibrary = { new (options: PlotOptions, data: Values[], place: Element): Plot; paths: { bars(options: object): unknown } };

type Step = { step: string; time: number; took: number | null };
type Candidate = { name: string; verdict: string; age: number | null; help: string | null };
type HistoryEvent = { time: number; text: string; tail?: string };
type Explanation = {
  gone: boolean;
  answer: string; suggestion: string | null; problems: string[]; facts: { [title: string]: string }; timeline: Step[]; candidates: Candidate[]; logs: { [title: string]: string };
  history: HistoryEvent[];
};

type LoadedConfig = {
  name: string; pid: number; file: string | null; secure: string | null; error: string | null; stale_since: number | null; warnings?: string[]; not_running?: { [provider: string]: string };
  providers?: { [name: string]: Json }; in_force_since?: number; changes?: string[]; labels?: Row; diskimages?: Row; "tenant-resource-limits"?: Row;
};

type Viewer = { owner: string; role: string };
type Lease = {
  id: string; state: string; owner: string; purpose: string; labels: string[]; nodes: { id: string }[]; created: string; ends: string | null;
  why: { text: string; queue_position: number | null } | null;
};
type Field = { key: string; title: string; type: string; read: (text: string) => unknown; [attribute: string]: string | number | boolean | ((text: string) => unknown) };
type Action = { title: string; role: string; call: (name: string) => [string, string]; command: (...names: string[]) => string; fields?: Field[]; force?: boolean };
