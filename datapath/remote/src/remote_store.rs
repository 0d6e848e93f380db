//! The [`Store`] that is read from a list of servers.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use headwater_store::{
    Check, Hash, Holes, Image, ImageName, Listed, MANIFEST_MAX_BYTES, Object, Pin, Publication, Removed,
    Store, StoreError, StoreErrorKind, TRACE_MAX_BYTES, Traffic, Waiting, WhileBusy, chunk_bytes_of,
};
use parking_lot::Mutex;

use crate::blame::{Blame, ServerChoice};
use crate::hole_lists::HoleLists;
use crate::holes::{ListWait, Question, ask as ask_for_holes};
use crate::limits::Limits;
use crate::probe;
use crate::read::{Answer, Ask, read, read_or_wait, wrong_as_a_whole};
use crate::relay_order::GivenPart;
use crate::servers::{Servers, WAIT_MAX};
use crate::status::{Counters, ServerState, Status};
use crate::transfer::Wanted;
use crate::url::ServerUrl;

/// The largest list of an image's versions.
const LIST_MAX_BYTES: u64 = 1 << 30;
/// The largest list of images: 260,000 of the longest names.
const NAMES_MAX_BYTES: u64 = 16 << 20;
/// The largest file `store`.
const SETTINGS_MAX_BYTES: u64 = 4096;

/// How to read from servers.
#[derive(Clone, Debug)]
pub struct Options {
    /// The servers, all with the same store.
    pub servers: Vec<ServerUrl>,
    /// A PEM file with the certificate authorities to trust, instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// A file with the token to send. It is read again from time to time, so that it can be replaced.
    pub token_file: Option<PathBuf>,
    /// Time limits and quantities.
    pub limits: Limits,
    /// How long opening, looking up and reads that fail fast wait for busy servers.
    pub while_busy: WhileBusy,
}

impl Options {
    /// Options for these servers, with the system's authorities and no token.
    pub fn new(servers: Vec<ServerUrl>) -> Self {
        let (limits, while_busy) = (Limits::default(), WhileBusy::default());
        Self { servers, ca_file: None, token_file: None, limits, while_busy }
    }
}

/// A read-only store on a list of servers. Cloning is cheap. It is closed when its last clone and last object
/// are dropped, or by [`RemoteStore::close`].
#[derive(Clone)]
pub struct RemoteStore {
    open: Arc<Open>,
    chunk_bytes: u32,
    /// Whether reads of objects wait while no server is available.
    retrying: bool,
    /// Whether all other requests wait for busy servers.
    waits_while_busy: bool,
}

/// Dropping it ends the probing thread, and reads that wait.
struct Open(Arc<Servers>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl RemoteStore {
    /// Opens the store. One available server is enough; if there is none, it fails with the answer of each
    /// server.
    pub fn open(options: Options) -> Result<Self, StoreError> {
        let open = Open::start(options)?;
        open.0.wait_for_first(true)?;
        let mut chunk_bytes = 0;
        let store = Self { open, chunk_bytes, retrying: true, waits_while_busy: true };
        store.whole("store", SETTINGS_MAX_BYTES, &mut |bytes| {
            chunk_bytes = chunk_bytes_of("at this server", bytes)?;
            Ok(())
        })?;
        Ok(Self { chunk_bytes, ..store })
    }

    /// As [`RemoteStore::open`] with a known chunk size, whether or not a server is available: reads of
    /// objects wait until one is.
    pub fn open_unseen(options: Options, chunk_bytes: u32) -> Result<Self, StoreError> {
        let open = Open::start(options)?;
        if let Err(e) = open.0.wait_for_first(false) {
            tracing::debug!(error = %e, "a store is opened although no server can be reached");
        }
        Ok(Self { open, chunk_bytes, retrying: true, waits_while_busy: true })
    }

    /// The state of each server, and why it is not used.
    pub fn status(&self) -> Status {
        self.open.0.status()
    }

    /// Counters since the store was opened.
    pub fn counters(&self) -> Counters {
        self.open.0.counting.view()
    }

    /// Ends reads in progress and waiting reads with an error, and refuses new ones.
    pub fn close(&self) {
        self.open.0.close();
    }
}

impl Open {
    /// Starts to probe the servers.
    fn start(options: Options) -> Result<Arc<Self>, StoreError> {
        let Options { servers, ca_file, token_file, limits, while_busy } = options;
        let servers = Servers::new(servers, ca_file.as_deref(), token_file, (limits, while_busy))?;
        let probing = Arc::clone(&servers);
        std::thread::Builder::new()
            .name("probe".into())
            .spawn(move || probe::run(&probing))
            .map_err(|e| StoreError::from_os("cannot start a thread that looks for servers", e))?;
        Ok(Arc::new(Self(servers)))
    }
}

impl Servers {
    /// Waits until a server is available, or all have been tried once; with `while_busy`, also for busy
    /// servers.
    fn wait_for_first(&self, while_busy: bool) -> Result<(), StoreError> {
        let began = Instant::now();
        loop {
            if let Ok(()) = self.wait_for_first_answer() {
                return Ok(());
            }
            let why = self.status().reasons();
            let is_over = self.while_busy.until(began).is_some_and(|at| Instant::now() >= at);
            if !while_busy
                || is_over
                || self.is_closed()
                || !self.is_any_busy()
                || !self.while_busy.report(&why)
            {
                // A busy server may have come back since the check above: then it can be used.
                if self.wait_for_first_answer().is_ok() {
                    return Ok(());
                }
                // Reads wait for all of these servers, even for those with wrong answers.
                return Err(StoreError::new(
                    StoreErrorKind::Unreachable,
                    format!("none of the servers can be used: {why}{}", self.try_again()),
                ));
            }
            self.wait(Some(Instant::now() + WAIT_MAX));
        }
    }

    /// Whether a reachable server is busy.
    fn is_any_busy(&self) -> bool {
        self.state.lock().records.iter().any(|record| record.is_busy_now())
    }

    /// Advice for a request that no server answers, as the end of a message.
    fn try_again(&self) -> &'static str {
        if self.is_any_busy() { " (try again later)" } else { "" }
    }

    /// Waits until a server is available. Fails if none is after all have been tried once.
    fn wait_for_first_answer(&self) -> Result<(), ()> {
        let mut state = self.state.lock();
        loop {
            let there = |record: &crate::servers::Record| matches!(record.health, crate::health::Health::Up);
            if state.records.iter().any(there) {
                return Ok(());
            }
            if state.records.iter().all(|record| record.probes > 0) {
                return Err(());
            }
            self.changed.wait_until(&mut state, Instant::now() + std::time::Duration::from_millis(200));
        }
    }
}

/// Parses a list of images: one name in each line, each name once. A repeated name would be requested, and
/// stored, as often as it occurs.
pub(crate) fn listed_names(bytes: &[u8]) -> Option<BTreeSet<ImageName>> {
    let mut names = BTreeSet::new();
    for line in std::str::from_utf8(bytes).ok()?.lines() {
        if !names.insert(line.parse().ok()?) {
            return None;
        }
    }
    Some(names)
}

/// Checks that a boot trace ends with the hash of the rest. A trace is only a hint: a server with a damaged
/// one is not asked for it again in this read, and keeps its state.
fn trace_is_whole(bytes: &[u8]) -> bool {
    bytes.split_last_chunk::<32>().is_some_and(|(rest, sum)| Hash::of(rest).0 == *sum)
}

impl RemoteStore {
    fn whole(&self, path: &str, max_bytes: u64, check: &mut Check<'_>) -> Result<Vec<u8>, StoreError> {
        let ask = Ask {
            path,
            wanted: Wanted::Whole { max_bytes },
            object: None,
            retrying: false,
            waits_while_busy: self.waits_while_busy,
            optional: false,
            short_timeout: false,
            choice: ServerChoice::default(),
        };
        read(&self.open.0, &ask, check).map(|answer| answer.body)
    }

    /// Reads a file that a good server may lack, such as the list of its images.
    fn optional(&self, path: &str, max_bytes: u64, check: &mut Check<'_>) -> Result<Vec<u8>, StoreError> {
        let ask = Ask {
            path,
            wanted: Wanted::Whole { max_bytes },
            object: None,
            retrying: false,
            waits_while_busy: self.waits_while_busy,
            optional: true,
            short_timeout: false,
            choice: ServerChoice::default(),
        };
        read(&self.open.0, &ask, check).map(|answer| answer.body)
    }

    fn read_only(&self, what: &str) -> StoreError {
        let place = self.shown();
        let why =
            format!("cannot {what} at {place}: a store is only read through servers; do it on the server");
        StoreError::new(StoreErrorKind::ReadOnly, why)
    }

    /// Opens an object with the length that a server reports.
    fn open_with_its_length(&self, id: Hash, choice: ServerChoice) -> Result<Arc<dyn Object>, StoreError> {
        let (path, bypass_caches) = (format!("objects/{id}"), choice.bypass_caches);
        // The answer to a request for any range contains the length of the whole.
        let wanted = Wanted::Range { first: 0, len: 1, total: None };
        let ask = Ask {
            path: &path,
            wanted,
            object: None,
            retrying: false,
            waits_while_busy: self.waits_while_busy,
            optional: false,
            short_timeout: false,
            choice,
        };
        let answer = read(&self.open.0, &ask, &mut |_| Ok(()))?;
        self.open.0.record_given(GivenPart { object: id, part: 0..1, server: answer.server, bypass_caches });
        let len_bytes = answer.total.ok_or_else(|| {
            StoreError::new(StoreErrorKind::Io, format!("the server does not say how long {path} is"))
        })?;
        Ok(Arc::new(self.object(id, len_bytes, bypass_caches)))
    }

    /// Opens an object. `bypass_caches`: the caller found it wrong before, so its holes are requested uncached.
    fn object(&self, id: Hash, len_bytes: u64, bypass_caches: bool) -> RemoteObject {
        RemoteObject {
            open: Arc::clone(&self.open),
            id,
            path: format!("objects/{id}"),
            len_bytes,
            retrying: self.retrying,
            waits_while_busy: self.waits_while_busy,
            bypass_caches,
            whole: Mutex::default(),
            known: Mutex::default(),
        }
    }

    fn image_names(&self) -> Result<Vec<ImageName>, StoreError> {
        let mut names = BTreeSet::new();
        let listed = self.optional("images/", NAMES_MAX_BYTES, &mut |bytes| {
            names = listed_names(bytes)
                .ok_or_else(|| StoreError::new(StoreErrorKind::Invalid, "it gives no list of images"))?;
            Ok(())
        });
        listed.map_err(|e| self.not_listed(&e))?;
        Ok(names.into_iter().collect())
    }

    /// The error if there is no list. A server that answers without a list never has one; one that does not
    /// answer may have one.
    fn not_listed(&self, error: &StoreError) -> StoreError {
        let status = self.status();
        let is_up = status.servers.iter().any(|server| server.state == ServerState::Up);
        let why = match error.kind() {
            StoreErrorKind::NotFound | StoreErrorKind::Invalid => format!(
                "these servers do not list their images (a plain web server cannot): name the image. {error}"
            ),
            StoreErrorKind::Unreachable if self.open.0.is_any_busy() => {
                format!("cannot list images: {error}{}", self.open.0.try_again())
            }
            StoreErrorKind::Unreachable if !is_up => format!(
                "cannot list images: no server answers: {} (start one, or see that this host reaches it, and try \
                 again)",
                status.reasons()
            ),
            _ => {
                format!("cannot list images: {error} (try again when more servers answer, or name the image)")
            }
        };
        StoreError::new(error.kind(), why)
    }
}

impl Store for RemoteStore {
    fn chunk_bytes(&self) -> u32 {
        self.chunk_bytes
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn traffic(&self) -> Option<Traffic> {
        let (status, counters) = (self.status(), self.counters());
        let up = status.servers.iter().filter(|server| server.state == ServerState::Up).count();
        Some(Traffic {
            servers: u64::try_from(status.servers.len()).unwrap_or(u64::MAX),
            servers_up: u64::try_from(up).unwrap_or(u64::MAX),
            requests: counters.requests,
            fetched_bytes: counters.fetched_bytes,
            failovers: counters.failovers,
            hedges: counters.hedges,
            wrong_answers: counters.wrong_answers,
            waits: counters.waits,
            waited_ms: counters.waited_ms,
            longest_wait_ms: counters.longest_wait_ms,
            longest_read_ms: counters.longest_read_ms,
            waiting: status.waiting,
            longest_away_ms: status
                .servers
                .iter()
                .filter_map(|server| server.away_for)
                .max()
                .map_or(0, |away| u64::try_from(away.as_millis()).unwrap_or(u64::MAX)),
            reasons: status.reasons(),
        })
    }

    fn close(&self) {
        RemoteStore::close(self);
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn shown(&self) -> String {
        let urls: Vec<String> = self.open.0.list.iter().map(|server| server.url.to_string()).collect();
        urls.join(",")
    }

    fn fail_fast(&self) -> Option<Arc<dyn Store>> {
        self.retrying.then(|| -> Arc<dyn Store> { Arc::new(Self { retrying: false, ..self.clone() }) })
    }

    fn with_short_timeout(&self) -> Option<Arc<dyn Store>> {
        let short_timeout = || Self { retrying: false, waits_while_busy: false, ..self.clone() };
        (self.retrying || self.waits_while_busy).then(|| -> Arc<dyn Store> { Arc::new(short_timeout()) })
    }

    fn images(&self) -> Result<Vec<Image>, StoreError> {
        let names = self.image_names()?;
        let images = names.iter().map(|name| self.image(name));
        images.filter_map(Result::transpose).collect()
    }

    fn listed(&self) -> Result<Listed, StoreError> {
        Listed::read(&self.image_names()?, |name| {
            self.image(name).map_err(|e| match e.kind() {
                // Servers are available, and none can give this list: a server whose own list is damaged
                // answers with an error.
                StoreErrorKind::Io if !self.open.0.is_closed() => {
                    StoreError::new(StoreErrorKind::Damaged, e.to_string())
                }
                _ => e,
            })
        })
    }

    fn image(&self, name: &ImageName) -> Result<Option<Image>, StoreError> {
        let mut image = None;
        let read = self.whole(&format!("images/{name}"), LIST_MAX_BYTES, &mut |bytes| {
            image = Some(Image::decode(name, bytes)?);
            Ok(())
        });
        match read {
            Err(e) if e.kind() == StoreErrorKind::NotFound => Ok(None),
            Err(e) if e.kind() == StoreErrorKind::Unreachable => Err(StoreError::new(
                e.kind(),
                match self.open.0.try_again() {
                    "" => format!(
                        "cannot find out whether image '{name}' exists: {e} (start a server of the store, such as 'headwater store serve', \
                         or check that this host can reach one, and try again)"
                    ),
                    later => format!("cannot find out whether image '{name}' exists: {e}{later}"),
                },
            )),
            read => read.map(|_| image),
        }
    }

    fn manifest(&self, id: Hash) -> Result<Vec<u8>, StoreError> {
        self.whole(&format!("manifests/{id}"), MANIFEST_MAX_BYTES, &mut |bytes| {
            if Hash::of(bytes) == id {
                return Ok(());
            }
            let why = "the hash of its bytes is not the one in its name";
            Err(StoreError::new(StoreErrorKind::Damaged, why))
        })
    }

    /// One server reports the length, which may be wrong. A caller that knows it calls
    /// [`Store::open_object_of`].
    fn open_object(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError> {
        self.open_with_its_length(id, ServerChoice::default())
    }

    fn open_object_uncached(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError> {
        // Any server that gave a part of it also reported its length.
        self.open_with_its_length(id, self.open.0.others_first(id, &(0..u64::MAX)))
    }

    fn open_object_of(&self, id: Hash, len_bytes: u64) -> Result<Arc<dyn Object>, StoreError> {
        Ok(Arc::new(self.object(id, len_bytes, false)))
    }

    fn trace(&self, manifest: Hash) -> Result<Option<Vec<u8>>, StoreError> {
        let check = &mut |bytes: &[u8]| {
            if trace_is_whole(bytes) {
                return Ok(());
            }
            Err(StoreError::new(StoreErrorKind::Damaged, "its checksum does not match"))
        };
        match self.optional(&format!("traces/{manifest}"), TRACE_MAX_BYTES, check) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(e) if e.kind() == StoreErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn set_trace(&self, _: Hash, _: Option<&[u8]>) -> Result<(), StoreError> {
        Err(self.read_only("store a boot trace"))
    }

    /// Servers are informed from time to time that the version is in use; see `docs/http-store.md`.
    fn pin(&self, manifest: Hash) -> Result<Pin, StoreError> {
        let servers = Arc::clone(&self.open.0);
        let mut state = servers.state.lock();
        match state.pins.iter_mut().find(|(pinned, _)| *pinned == manifest) {
            Some((_, count)) => *count += 1,
            None => {
                state.pins.push((manifest, 1));
                // The manifest may have come from a cache, so that the server does not know yet that the
                // version is in use.
                state.pins_due = true;
                servers.announce_change();
            }
        }
        drop(state);
        Ok(Pin::new(RemotePin { servers, manifest }))
    }

    fn publish(&self) -> Result<Box<dyn Publication>, StoreError> {
        Err(self.read_only("make a version"))
    }

    fn change(
        &self,
        name: &ImageName,
        _: &mut dyn FnMut(&mut Image) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        Err(self.read_only(&format!("change image '{name}'")))
    }

    fn remove(&self, name: &ImageName, number: Option<u32>) -> Result<Removed, StoreError> {
        let what = number.map_or_else(|| format!("image '{name}'"), |number| format!("{name}@{number}"));
        Err(self.read_only(&format!("remove {what}")))
    }

    fn remove_unless_promoted(&self, name: &ImageName) -> Result<Removed, StoreError> {
        // Its channels are not checked, because no operation here changes them.
        self.remove(name, None)
    }
}

impl std::fmt::Debug for RemoteStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let urls: Vec<String> = self.open.0.list.iter().map(|server| server.url.to_string()).collect();
        f.debug_struct("RemoteStore").field("servers", &urls).finish_non_exhaustive()
    }
}

struct RemotePin {
    servers: Arc<Servers>,
    manifest: Hash,
}

impl Drop for RemotePin {
    fn drop(&mut self) {
        let pins = &mut self.servers.state.lock().pins;
        if let Some((_, count)) = pins.iter_mut().find(|(pinned, _)| *pinned == self.manifest) {
            *count -= 1;
        }
        pins.retain(|(_, count)| *count > 0);
    }
}

struct RemoteObject {
    open: Arc<Open>,
    id: Hash,
    path: String,
    len_bytes: u64,
    retrying: bool,
    /// Whether reads that fail fast wait for busy servers.
    waits_while_busy: bool,
    /// The caller found the object wrong before: its holes are requested with caches bypassed.
    bypass_caches: bool,
    /// State of the reads without a check; never locked across I/O.
    whole: Mutex<Blame>,
    /// The known holes, as servers reported them; never locked across I/O.
    known: Mutex<Option<Known>>,
}

/// What is known about the holes of an object.
#[derive(Clone, Default)]
struct Known {
    /// Ranges that must not be read: the holes that all servers share, or those of the server that was chosen
    /// to give the whole object.
    holes: Arc<Holes>,
    lists: HoleLists,
}

impl RemoteObject {
    /// Fills `into` without a check.
    fn read_unchecked(
        &self,
        offset: u64,
        into: &mut [u8],
        choice: &dyn Fn(&Range<u64>) -> ServerChoice,
        gave: &mut dyn FnMut(usize, u64),
    ) -> Result<(), StoreError> {
        let known = self.known.lock().as_ref().map(|known| known.lists.clone());
        let Some(lists) = known else {
            // Another open object may have given the holes to the client of a relay.
            return self.read_as_remembered(offset, into, choice, gave);
        };
        in_pieces(&lists, offset, into, |piece, here| {
            self.read_piece(&piece, here, choice(&piece), (&lists, false), gave)
        })
    }

    /// Reads with the remembered lists. If a piece cannot be read with them, the lists are requested again.
    /// If no server has the piece, the bytes in holes are used.
    fn read_as_remembered(
        &self,
        offset: u64,
        into: &mut [u8],
        choice: &dyn Fn(&Range<u64>) -> ServerChoice,
        gave: &mut dyn FnMut(usize, u64),
    ) -> Result<(), StoreError> {
        let lists = self.open.0.lists_of(self.id);
        in_pieces(&lists, offset, into, |piece, here| {
            let Err(e) = self.read_piece(&piece, here, choice(&piece), (&lists, false), gave) else {
                return Ok(());
            };
            let now = self.remembered_since(&piece, &lists, e)?;
            in_pieces(&now, piece.start, here, |piece, here| {
                self.read_piece(&piece, here, choice(&piece), (&now, true), gave)
            })
        })
    }

    /// Reads a piece from servers that have it according to these lists. If none does and `or_bytes_in_holes`
    /// is set, uses the bytes in holes. Calls `gave` with each server and the number of bytes from it.
    fn read_piece(
        &self,
        piece: &Range<u64>,
        into: &mut [u8],
        mut choice: ServerChoice,
        (lists, or_bytes_in_holes): (&HoleLists, bool),
        gave: &mut dyn FnMut(usize, u64),
    ) -> Result<(), StoreError> {
        let servers = &self.open.0;
        lists.direct(&mut choice, piece, servers.list.len(), true);
        choice.or_bytes_in_holes = or_bytes_in_holes;
        let bypass_caches = choice.bypass_caches;
        if let Some(server) = self.read(piece.start, into, choice, &mut |_| Ok(()))? {
            gave(server, piece.end.saturating_sub(piece.start));
            // For clients that find it wrong.
            servers.record_given(GivenPart { object: self.id, part: piece.clone(), server, bypass_caches });
        }
        Ok(())
    }

    /// Requests the holes again if a piece could not be read from the servers that should have it, because
    /// they are away or no longer have it.
    fn remembered_since(
        &self,
        piece: &Range<u64>,
        lists: &HoleLists,
        error: StoreError,
    ) -> Result<HoleLists, StoreError> {
        let servers = &self.open.0;
        let is_away = error.kind() == StoreErrorKind::Unreachable;
        let is_nowhere = matches!(error.kind(), StoreErrorKind::NotFound | StoreErrorKind::Damaged);
        let is_anywhere = lists.lacking(piece, servers.list.len()).is_empty();
        if !(is_away || is_nowhere) || is_anywhere || servers.is_closed() {
            return Err(error);
        }
        let is_due = servers.is_to_be_asked(self.id, servers.limits.wait_for_better);
        let now = if is_due { self.ask_for_holes(true, self.waits()).ok() } else { None };
        if let Some(now) = &now {
            servers.remember_lists(self.id, now);
        }
        match now.filter(|now| !now.is_same(lists)) {
            Some(now) => Ok(now),
            None if is_nowhere => Ok(lists.clone()),
            None => Err(error),
        }
    }

    /// Fills `into`, and returns the server that gave the bytes, if any were read.
    fn read(
        &self,
        offset: u64,
        into: &mut [u8],
        choice: ServerChoice,
        check: &mut Check<'_>,
    ) -> Result<Option<usize>, StoreError> {
        let len = u64::try_from(into.len()).unwrap_or(u64::MAX);
        self.check_range(offset, len)?;
        if len == 0 {
            return check(into).map(|()| None);
        }
        let answer = read(&self.open.0, &self.ask(offset, len, choice), check)?;
        self.fill(into, &answer)?;
        Ok(Some(answer.server))
    }

    fn ask(&self, offset: u64, len: u64, choice: ServerChoice) -> Ask<'_> {
        let wanted = Wanted::Range { first: offset, len, total: Some(self.len_bytes) };
        let object = Some(self.id);
        Ask {
            path: &self.path,
            wanted,
            object,
            retrying: self.retrying,
            waits_while_busy: self.waits_while_busy,
            optional: false,
            short_timeout: false,
            choice,
        }
    }

    /// Which servers to ask for a range that is checked on arrival.
    fn choice_for(&self, part: &Range<u64>) -> ServerChoice {
        let (servers, mut choice) = (&self.open.0, ServerChoice::default());
        servers.lists_of(self.id).direct(&mut choice, part, servers.list.len(), false);
        choice
    }

    /// Asks servers for the holes of the object.
    fn ask_for_holes(&self, bypass_caches: bool, waits: ListWait) -> Result<HoleLists, StoreError> {
        let whole = self.whole.lock();
        let choice = ServerChoice { bypass_caches, ..whole.choice() };
        let readings: Vec<_> = (0..self.open.0.list.len()).map(|server| whole.next_reading(server)).collect();
        drop(whole);
        let reading = |server: usize| readings.get(server).copied().flatten();
        self.ask_with(&choice, &reading, waits)
    }

    fn ask_with(
        &self,
        choice: &ServerChoice,
        reading: &(dyn Fn(usize) -> Option<u32> + Sync),
        waits: ListWait,
    ) -> Result<HoleLists, StoreError> {
        let (id, len_bytes, short_timeout) = (self.id, self.len_bytes, !self.retrying);
        let waits_while_busy = self.waits_while_busy;
        ask_for_holes(
            &self.open.0,
            &Question { id, len_bytes, short_timeout, waits_while_busy, choice, reading },
            waits,
        )
    }

    fn waits(&self) -> ListWait {
        if self.retrying { ListWait::ForBetter } else { ListWait::ForProbe }
    }

    /// Remembers the lists. If one server was chosen to give the whole object, only its holes are skipped.
    fn keep(&self, lists: HoleLists) -> Arc<Holes> {
        let mut whole = self.whole.lock();
        // If the chosen server is a relay, the list may be that of one of its servers.
        if whole.choice().reading.is_none() {
            self.open.0.remember_lists(self.id, &lists);
        }
        let giver = whole.choose_giver(&lists);
        drop(whole);
        let holes = giver.and_then(|giver| lists.of(giver)).cloned().unwrap_or_else(|| lists.common());
        *self.known.lock() = Some(Known { holes: Arc::clone(&holes), lists });
        holes
    }

    fn fill(&self, into: &mut [u8], answer: &Answer) -> Result<(), StoreError> {
        let Some(body) = answer.body.get(..into.len()) else {
            return Err(StoreError::new(
                StoreErrorKind::Io,
                format!("the servers sent too few bytes of {}", self.path),
            ));
        };
        into.copy_from_slice(body);
        Ok(())
    }

    /// Whether `len` bytes at `offset` are in the object.
    fn check_range(&self, offset: u64, len: u64) -> Result<(), StoreError> {
        if offset.checked_add(len).is_some_and(|end| end <= self.len_bytes) {
            return Ok(());
        }
        let why = format!("{len} bytes at {offset} are not in {}, which has {}", self.path, self.len_bytes);
        Err(StoreError::new(StoreErrorKind::Damaged, why))
    }
}

/// Fills `into` piece by piece. Each piece extends as far as one server has it according to these lists.
fn in_pieces(
    lists: &HoleLists,
    offset: u64,
    into: &mut [u8],
    mut read: impl FnMut(Range<u64>, &mut [u8]) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    let mut rest = into;
    for piece in lists.pieces(&part(offset, rest)) {
        let len = usize::try_from(piece.end.saturating_sub(piece.start)).unwrap_or(usize::MAX);
        let (here, after) = rest.split_at_mut(len.min(rest.len()));
        read(piece, here)?;
        rest = after;
    }
    Ok(())
}

/// The range of an object that fills `into` from `offset`.
fn part(offset: u64, into: &[u8]) -> Range<u64> {
    offset..offset.saturating_add(u64::try_from(into.len()).unwrap_or(u64::MAX))
}

impl Object for RemoteObject {
    fn id(&self) -> Hash {
        self.id
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        let choice = self.whole.lock().choice();
        let gave = &mut |server, len| self.whole.lock().read(server, len);
        self.read_unchecked(offset, into, &|_| choice.clone(), gave)
    }

    fn read_range_past_caches(
        &self,
        offset: u64,
        into: &mut [u8],
        reading: Option<u32>,
    ) -> Result<(), StoreError> {
        let servers = &self.open.0;
        let choice = |piece: &Range<u64>| match reading {
            Some(reading) => servers.rotate(reading),
            None => servers.others_first(self.id, piece),
        };
        self.read_unchecked(offset, into, &choice, &mut |_, _| {})
    }

    fn read_checked(&self, offset: u64, into: &mut [u8], check: &mut Check<'_>) -> Result<(), StoreError> {
        let choice = self.choice_for(&part(offset, into));
        self.read(offset, into, choice, check).map(drop)
    }

    fn read_or_wait(
        &self,
        offset: u64,
        into: &mut [u8],
        check: &mut Check<'_>,
        waiting: &mut Waiting,
    ) -> Result<bool, StoreError> {
        let len = u64::try_from(into.len()).unwrap_or(u64::MAX);
        self.check_range(offset, len)?;
        if len == 0 {
            return check(into).map(|()| true);
        }
        let ask = self.ask(offset, len, self.choice_for(&part(offset, into)));
        match read_or_wait(&self.open.0, &ask, check, waiting)? {
            Some(answer) => self.fill(into, &answer).map(|()| true),
            None => Ok(false),
        }
    }

    fn holes(&self) -> Result<Arc<Holes>, StoreError> {
        if let Some(known) = &*self.known.lock() {
            return Ok(Arc::clone(&known.holes));
        }
        if self.bypass_caches || !self.retrying {
            return self.ask_for_holes(self.bypass_caches, self.waits()).map(|lists| self.keep(lists));
        }
        match self.ask_for_holes(false, ListWait::None) {
            Ok(lists) => Ok(self.keep(lists)),
            Err(e) if e.kind() == StoreErrorKind::UnknownFormat || self.open.0.is_closed() => Err(e),
            // A cache may have all bytes while the server with the list is away. If there are holes, the hash
            // of the bytes will be wrong.
            Err(e) => {
                tracing::debug!(error = %e, what = %self.path, "cannot find out whether the object has holes: assuming none");
                Ok(Arc::clone(&self.known.lock().get_or_insert_default().holes))
            }
        }
    }

    fn holes_uncached(&self) -> Result<Arc<Holes>, StoreError> {
        self.whole.lock().read_past_caches();
        self.ask_for_holes(true, self.waits()).map(|lists| self.keep(lists))
    }

    /// Not remembered: if the server is a relay, the list is that of one of its servers.
    fn holes_of_reading(&self, reading: u32) -> Result<Arc<Holes>, StoreError> {
        let choice = self.open.0.rotate(reading);
        let lists = self.ask_with(&choice, &|_| choice.reading, self.waits())?;
        let first = choice.first.and_then(|first| lists.of(first));
        Ok(first.cloned().unwrap_or_else(|| lists.common()))
    }

    fn was_wrong(&self) -> bool {
        let servers = &self.open.0;
        let count = servers.list.len();
        let Some(before) = self.known.lock().clone() else {
            // No server was asked for holes, which may be why the object is wrong.
            return self.whole.lock().was_wrong(self.len_bytes, count, false).again;
        };
        // The object may have got holes while it was read, or a server with other holes may be back. Then the
        // server whose hole was read is not to blame. If this cannot be found out, no server is blamed. It
        // counts as an attempt, so that the repetition ends.
        let now = match self.ask_for_holes(true, self.waits()) {
            Ok(now) => now,
            Err(e) => {
                tracing::debug!(error = %e, what = %self.path, "the hash of an object was wrong, and its holes cannot be found out");
                return self.whole.lock().begin_again(count);
            }
        };
        let mut whole = self.whole.lock();
        let again = if !now.is_same(&before.lists) && !whole.is_again() {
            whole.begin_again(count)
        } else {
            let giver = whole.choice().first;
            let is_sure = giver.is_some_and(|giver| {
                now.of(giver) == before.lists.of(giver) && now.of(giver) == Some(&before.holes)
            });
            let there_bytes = self.len_bytes.saturating_sub(before.holes.bytes());
            let verdict = whole.was_wrong(there_bytes, count, is_sure);
            if let Some(blamed) = verdict.server {
                servers.gave_wrong_bytes(blamed, &self.path, &wrong_as_a_whole());
            }
            verdict.again
        };
        drop(whole);
        self.keep(now);
        again
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_images_has_each_name_once() {
        let names = |text: &str| listed_names(text.as_bytes()).map(|names| names.len());
        assert_eq!((names(""), names("a\n"), names("b\na\nc-1")), (Some(0), Some(1), Some(3)));
        assert_eq!(listed_names(b"\xff"), None);
        // A web page is not a list, either.
        for bad in ["a\nb\na\n", "a\n\n", "<html>\n<a href=\"a\">a</a>\n", "a b\n"] {
            assert_eq!(names(bad), None, "{bad}");
        }
    }
}
