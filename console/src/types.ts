// The types of the API under the names that the console uses.

import type * as api from "./generated";

export type {
  Alarm,
  CacheContents,
  CacheMode,
  CatalogAdvice,
  Change,
  Channel,
  ChannelPointer as Pointer,
  ContentsKind,
  Event,
  Image,
  ImageList,
  ImageVersion as Version,
  HeldBytes,
  TaskResult as Result,
  MachineState,
  PathContents,
  Role,
  Status,
  Task,
  TokenInfo,
} from "./generated";

/** Requests may leave settings of a write cache out; answers have all of them. */
export type Cache = Required<api.CacheSettings>;
export type Machine = Omit<api.Machine, "cache"> & { cache: Cache };
export type Catalog = Omit<api.Catalog, "cache"> & { cache: Cache };

/** What the daemon says about a failure. The console adds kinds of its own, such as `unreachable`. */
export type Refusal = Omit<api.Problem, "kind"> & { kind: string };
