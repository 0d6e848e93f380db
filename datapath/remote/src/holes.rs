//! What of an object is gone, as servers say, and who is to give it.
//!
//! Each server gave back the space of what its own versions do not need. So each that is there is asked, and where something is gone on one
//! of them, one server is to give all of the object, with its own list: the one on which the least is gone, and of several the one that
//! reads prefer. So none takes from a copy what another one has.
//!
//! | a server | what is gone there |
//! |---|---|
//! | gives a list of holes | these |
//! | does not have one (404), or answers with something else that is no error of its own, such as 403 | nothing: so do servers that know of no holes |
//! | gives a wrong one | it is asked once more, past caches; then it is distrusted, as for other wrong bytes, and left out |
//! | gives one of a later format | it is left out |
//! | is distrusted | it is asked where nobody else has answered |
//! | breaks off, answers with 5xx, is busy, refuses the token | it is left out, and nobody else hears of it: what it cannot list it may give |
//! | does not answer | it is left out, and is down |
//!
//! A server that was left out may give bytes of the object all the same: then these are wrong as a whole, and it is asked again.
//!
//! Where all are left out:
//!
//! | who asks | |
//! |---|---|
//! | for the first time, and can wait for bytes | it is taken for "nothing is gone": a cache on the way may have all bytes of an object while who has the list is away |
//! | found the object wrong, and can wait for bytes | it waits as for these: for those that are away or busy as long as it takes, for those that fail as long as for better bytes |
//! | cannot wait, such as a server that reads from servers itself | an error, soon: it is told what is known, or nothing |

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use headwater_store::{Hash, Holes, StoreError, StoreErrorKind};

use crate::attempt::{Attempt, attempt};
use crate::read::{Ask, PROBE_WAITS, choose};
use crate::servers::Servers;
use crate::transfer::Fault;
use crate::whole::Whom;

/// Who does not wait asks one that has failed so often no more.
const FAILURES_MAX: u32 = 2;

/// For what a question waits where nobody can answer it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waits {
    No,
    /// For those that may be back at once.
    Soon,
    /// As who reads its bytes does.
    AsForBytes,
}

/// What servers said.
#[derive(Debug, Default)]
pub(crate) struct Told {
    /// What is gone where the object is to be read.
    pub holes: Holes,
    /// Who is to give all of it; `None` where nothing is gone on anyone, so that any may give any part.
    pub giver: Option<usize>,
    /// Those that said what is gone there, and the hashes of their lists: of the empty one where nothing is.
    said: BTreeMap<usize, Hash>,
}

impl Told {
    /// Those on which just these are gone.
    pub(crate) fn who_said(&self, holes: &Holes, len_bytes: u64) -> BTreeSet<usize> {
        let list = Hash::of(&holes.encode(len_bytes));
        self.said.iter().filter(|(_, said)| **said == list).map(|(server, _)| *server).collect()
    }
}

/// A server that has not said what is gone there, or not yet.
#[derive(Debug, Default)]
struct LeftOut {
    why: Option<StoreError>,
    /// Its list was wrong, or is of a later format: it is not asked again.
    is_wrong: bool,
    /// How often it failed, and when it may be asked again.
    times: u32,
    again_at: Option<Instant>,
}

/// Why there is no list.
enum NoList {
    /// It is wrong, or cannot be read here.
    Wrong(StoreError),
    /// It failed with this, or is busy, and is to be left alone for so long.
    NotNow(StoreError, Duration),
    /// The server does not answer, and is known to be down.
    Gone(StoreError),
}

impl LeftOut {
    fn failed(&mut self, no_list: NoList) {
        self.times = self.times.saturating_add(1);
        let (why, pause) = match no_list {
            NoList::Wrong(why) => {
                self.is_wrong = true;
                (why, None)
            }
            NoList::NotNow(why, pause) => (why, Some(pause)),
            NoList::Gone(why) => (why, None),
        };
        self.why = Some(why);
        self.again_at = pause.map(|pause| Instant::now() + pause);
    }
}

/// Asks for the list of the holes of an object that has `len_bytes`.
pub(crate) fn holes_of(
    servers: &Servers,
    ask: &Ask<'_>,
    len_bytes: u64,
    waits: Waits,
) -> Result<Told, StoreError> {
    let began = Instant::now();
    let liars: Vec<bool> = (0..servers.list.len()).map(|server| ask.whom.liars.contains(&server)).collect();
    let mut left_out: Vec<LeftOut> = liars.iter().map(|_| LeftOut::default()).collect();
    let probed_until = began + servers.limits.probe_after.saturating_mul(PROBE_WAITS);
    // As for its bytes: somebody who is away may have better ones, but not for ever.
    let better_until = liars.contains(&true).then(|| began + servers.limits.wait_for_better);
    let (mut waiting_since, mut failing_since) = (None::<Instant>, None::<Instant>);
    loop {
        if servers.is_closed() {
            return Err(closed());
        }
        let why = match ask_those_that_are_there(servers, ask, len_bytes, &liars, &mut left_out) {
            Err(why) => why,
            Ok(told) => {
                if let Some(since) = waiting_since {
                    servers.counting.waited(since.elapsed());
                }
                return Ok(told);
            }
        };
        let now = Instant::now();
        let is_away = why.kind() == StoreErrorKind::Unreachable;
        // Time in which all are away says nothing about what they have.
        failing_since = if is_away { None } else { failing_since.or(Some(now)) };
        let failing_until = failing_since.map(|since| since + servers.limits.wait_for_better);
        let until = [better_until, failing_until].into_iter().flatten().min();
        let goes_on = match waits {
            Waits::No => false,
            Waits::Soon => {
                let is_first = |left: &&LeftOut| left.times < FAILURES_MAX;
                let again_at = left_out.iter().filter(is_first).filter_map(|left| left.again_at).min();
                match again_at.filter(|at| *at <= probed_until) {
                    Some(at) => {
                        servers.wait(Some(at));
                        true
                    }
                    None => servers.wait_for_probe(&liars, probed_until),
                }
            }
            Waits::AsForBytes => {
                let may_have_one = |(liar, left): (&bool, &LeftOut)| !liar && !left.is_wrong;
                let goes_on =
                    liars.iter().zip(&left_out).any(may_have_one) && until.is_none_or(|until| now < until);
                if goes_on {
                    waiting_since.get_or_insert(now);
                    let again_at = left_out.iter().filter_map(|left| left.again_at).min();
                    servers.wait([until, again_at].into_iter().flatten().min());
                }
                goes_on
            }
        };
        if !goes_on {
            return Err(match better_until.filter(|_| is_away) {
                Some(_) => {
                    let why = format!("{why}; and what others have of this object is wrong");
                    StoreError::new(StoreErrorKind::Damaged, why)
                }
                None => why,
            });
        }
    }
}

fn closed() -> StoreError {
    StoreError::new(StoreErrorKind::Io, "the store was closed during a read")
}

/// Asks one after the other, but for liars and those that are to be left alone for now.
fn ask_those_that_are_there(
    servers: &Servers,
    ask: &Ask<'_>,
    len_bytes: u64,
    liars: &[bool],
    left_out: &mut [LeftOut],
) -> Result<Told, StoreError> {
    let now = Instant::now();
    for (server, left) in left_out.iter_mut().enumerate() {
        // It is asked when it is back, however long that takes.
        if !left.is_wrong && !servers.is_there(server) {
            *left = LeftOut { times: left.times, ..LeftOut::default() };
        }
    }
    let is_out =
        |(liar, left): (&bool, &LeftOut)| *liar || left.is_wrong || left.again_at.is_some_and(|at| at > now);
    let mut excluded: Vec<bool> = liars.iter().zip(left_out.iter()).map(is_out).collect();
    let (mut said, mut best) = (BTreeMap::new(), None::<((usize, u64), usize, Holes)>);
    while let Some(server) = choose(servers, ask, 0, &excluded) {
        if let Some(is_out) = excluded.get_mut(server) {
            *is_out = true;
        }
        let Some(left) = left_out.get_mut(server) else { continue };
        if best.is_some() && servers.is_distrusted(server) {
            continue;
        }
        let holes = match ask_one(servers, ask, len_bytes, server, left.times) {
            Ok(holes) => holes,
            Err(no_list) => {
                left.failed(no_list);
                continue;
            }
        };
        said.insert(server, Hash::of(&holes.encode(len_bytes)));
        // They are asked in the order in which reads prefer them, and the first of several counts.
        let turn = ask.whom.last.iter().position(|last| *last == server).map_or(0, |turn| turn + 1);
        let rank = (turn, holes.bytes());
        if best.as_ref().is_none_or(|(least, ..)| rank < *least) {
            best = Some((rank, server, holes));
        }
    }
    let Some((_, server, holes)) = best else { return Err(why_not(servers, ask, left_out)) };
    let nothing = Hash::of(&Holes::default().encode(len_bytes));
    let giver = Some(server).filter(|_| ask.whom.alone || said.values().any(|list| *list != nothing));
    Ok(Told { holes, giver, said })
}

/// Why nobody gives a list. What a server says that is there tells more than that another one is away.
fn why_not(servers: &Servers, ask: &Ask<'_>, left_out: &[LeftOut]) -> StoreError {
    let weight = |why: &&StoreError| match why.kind() {
        StoreErrorKind::Unreachable => 0,
        StoreErrorKind::UnknownFormat => 3,
        StoreErrorKind::Damaged => 2,
        _ => 1,
    };
    let why = left_out.iter().filter_map(|left| left.why.as_ref()).max_by_key(weight);
    why.cloned().unwrap_or_else(|| {
        let why = format!("no server can be asked for {}: {}", ask.path, servers.status().reasons());
        StoreError::new(StoreErrorKind::Unreachable, why)
    })
}

/// Asks one server that has failed so often before, and once more past caches where what came is wrong.
fn ask_one(
    servers: &Servers,
    ask: &Ask<'_>,
    len_bytes: u64,
    server: usize,
    failures: u32,
) -> Result<Holes, NoList> {
    let (mut past_caches, mut token_renewed) = (ask.whom.past_caches, false);
    loop {
        // Nobody else is asked beside it: who is late is left out.
        let whom = Whom { alone: true, ..Whom::default() };
        let asked = Ask { path: ask.path, wanted: ask.wanted, patient: false, optional: true, whom };
        let past = vec![past_caches; servers.list.len()];
        let (body, times) = match attempt(servers, &asked, server, &[], &past) {
            Attempt::Closed => return Err(NoList::Gone(closed())),
            Attempt::Answer { answer, times, .. } => (answer.body, times),
            Attempt::Failed(faults) => match faults.into_iter().next() {
                Some((_, Fault::Refused(_)))
                    if !std::mem::replace(&mut token_renewed, true) && servers.renew_token() =>
                {
                    continue;
                }
                Some((_, fault)) => return without_list(servers, ask, server, failures, &fault),
                None => return without_list(servers, ask, server, failures, &Fault::Stale),
            },
        };
        let why = match Holes::decode("at this server", &body, len_bytes) {
            Ok(holes) => {
                servers.answered(server, u64::try_from(body.len()).unwrap_or(u64::MAX), times);
                return Ok(holes);
            }
            Err(why) => why,
        };
        if why.kind() == StoreErrorKind::Damaged {
            if !std::mem::replace(&mut past_caches, true) {
                continue;
            }
            servers.gave_wrong_bytes(server, ask.path, &why);
        }
        return Err(NoList::Wrong(no_list(servers, ask, server, why.kind(), &why)));
    }
}

/// What it means that an answer is no list.
fn without_list(
    servers: &Servers,
    ask: &Ask<'_>,
    server: usize,
    failures: u32,
    fault: &Fault,
) -> Result<Holes, NoList> {
    let why = |kind| no_list(servers, ask, server, kind, fault);
    Err(match fault {
        Fault::Missing | Fault::Odd(_) | Fault::Wrong(_) => {
            tracing::debug!(server, answer = %fault, "all of the object is taken to be there");
            return Ok(Holes::default());
        }
        Fault::Busy(wait, _) => {
            let pause = servers.busy_for(failures).max(*wait);
            NoList::NotNow(why(StoreErrorKind::Unreachable), pause)
        }
        Fault::Broke(_) | Fault::Refused(_) => {
            tracing::debug!(server, answer = %fault, what = ask.path, "a server cannot say what is gone");
            NoList::NotNow(why(StoreErrorKind::Io), servers.pause_after(failures))
        }
        Fault::Gone(_) | Fault::Stale => {
            servers.failed(server, ask.path, fault);
            NoList::Gone(why(StoreErrorKind::Unreachable))
        }
    })
}

fn no_list(
    servers: &Servers,
    ask: &Ask<'_>,
    server: usize,
    kind: StoreErrorKind,
    why: &dyn std::fmt::Display,
) -> StoreError {
    let url = servers.list.get(server).map(|server| server.url.to_string()).unwrap_or_default();
    StoreError::new(kind, format!("no server gives {}: {url}: {why}", ask.path))
}
