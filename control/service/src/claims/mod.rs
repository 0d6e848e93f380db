//! Claims: machines of a catalog that are lent to a holder.
//!
//! ```text
//!   ready: on, booted, not used --claim--> claimed --release, end of its time--> ended --reset, or switched off--> free
//!                                             \--the guest shuts down--------------------------------------------/
//! ```
//! A claimed machine has a row, until it was reset or is off after the claim. A machine with a row is not given to anybody
//! else, and each boot begins with a pristine disk: so nobody gets a machine that somebody else has used. Rows are checked
//! and written in one transaction, so that a machine has one holder.

mod handover;
mod plan;
mod pool;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use headwater_api::{
    BootFrom, CacheSettings, Claim, ClaimRequest, MAX_CLAIM_WAIT_S, MAX_HOLDER_CHARS, MAX_KEY_CHARS,
    MAX_STOP_IDLE_S, MachineState, OneTimeSecret, ProblemKind, ResetOn, Wanted,
};
use headwater_db::{ClaimRecord, DbError, MachineRecord, PoolRecord, Repository};
use tokio::time::Instant;
use uuid::Uuid;

use crate::Service;
use crate::answer::{Explain, problem};
use crate::caller::Caller;
use crate::catalogs::CatalogError;
use crate::lifecycle::Active;

/// How often a waiting claim looks for a machine.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// By claim: whether its guest was given a secret. The mutex is locked while a request does that.
type Handovers = HashMap<Uuid, Arc<tokio::sync::Mutex<bool>>>;

/// The state of claims that is not in the database.
#[derive(Debug, Default)]
pub(crate) struct ClaimsState {
    /// Machines that are being reset because their claims have ended.
    resetting: Mutex<HashSet<Uuid>>,
    handovers: Mutex<Handovers>,
    pool: pool::PoolState,
}

impl ClaimsState {
    fn resetting(&self) -> MutexGuard<'_, HashSet<Uuid>> {
        self.resetting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handovers(&self) -> MutexGuard<'_, Handovers> {
        self.handovers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of surplus machines of a catalog.
    #[cfg(test)]
    pub(crate) fn pool_excess(&self, catalog: &str) -> usize {
        self.pool.excess(catalog)
    }
}

/// Why a machine cannot be claimed or released.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClaimError {
    #[error("cannot claim a machine of catalog '{catalog}': {why}")]
    Invalid { catalog: String, why: String },
    #[error(
        "cannot claim a machine of catalog '{0}': its machines have persistent disks, which the next holder would see"
    )]
    Persistent(String),
    #[error(
        "cannot keep machines of catalog '{0}' ready to be claimed: they have persistent disks, which the next holder would see"
    )]
    PersistentPool(String),
    #[error(
        "cannot claim a machine of catalog '{catalog}': none is ready; of {machines}, {claimed} are claimed"
    )]
    NoneReady { catalog: String, machines: usize, claimed: usize },
    #[error("cannot claim a machine of catalog '{catalog}': the claim with the key '{key}' has ended")]
    KeyEnded { catalog: String, key: String },
    #[error("cannot claim machine '{machine}' with a secret: {why}")]
    Secret { machine: String, why: String },
    #[error("the time after which idle machines of catalog '{0}' are switched off is too long: it may have {days} days at most", days = MAX_STOP_IDLE_S / 86_400)]
    LongIdle(String),
    #[error("there is no claim '{0}', and no claimed machine of that name")]
    Unknown(String),
    #[error("cannot claim a machine: the system gave no random numbers")]
    Random(#[from] std::io::Error),
    #[error("cannot claim a machine of catalog '{0}': the daemon is stopping")]
    Stopping(String),
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    #[error(transparent)]
    Db(#[from] DbError),
}

impl Explain for ClaimError {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::Invalid { .. } | Self::Persistent(_) | Self::PersistentPool(_) | Self::LongIdle(_) => {
                ProblemKind::Invalid
            }
            Self::NoneReady { .. } | Self::KeyEnded { .. } => ProblemKind::Conflict,
            Self::Unknown(_) => ProblemKind::NotFound,
            Self::Stopping(_) => ProblemKind::Unavailable,
            Self::Random(_) | Self::Secret { .. } => ProblemKind::Failed,
            Self::Catalog(e) => e.kind(),
            Self::Db(e) => e.kind(),
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::Invalid { .. } | Self::LongIdle(_) | Self::Stopping(_) | Self::Random(_) => None,
            Self::Persistent(_) | Self::PersistentPool(_) => {
                Some("make a catalog without --persistent for that".to_owned())
            }
            Self::NoneReady { catalog, .. } => Some(format!(
                "wait for one with --wait, or have some ready: 'headwater catalog set {catalog} --keep-ready COUNT', 'headwater catalog scale'"
            )),
            Self::Secret { .. } => Some(
                "the image needs qemu-guest-agent, and /etc/headwater/claimed, if it is there, must exit with 0; or claim without --secret. After a restart of the guest, ask again with the same --key"
                    .to_owned(),
            ),
            Self::KeyEnded { .. } => Some("use another key for another claim".to_owned()),
            Self::Unknown(_) => Some("'headwater catalog claims' shows all claims".to_owned()),
            Self::Catalog(e) => e.advice(),
            Self::Db(e) => e.advice(),
        }
    }

    fn retry_after_s(&self) -> Option<u32> {
        match self {
            Self::Catalog(e) => e.retry_after_s(),
            Self::Db(e) => e.retry_after_s(),
            _ => None,
        }
    }
}

/// Fails for machines with persistent disks, which outlive a reset of the guest.
pub(crate) fn check_pool(pool: &PoolRecord, cache: &CacheSettings) -> Result<(), ClaimError> {
    let is_pool = pool.keep_ready > 0 || pool.stop_idle_s > 0 || pool.ready_hours.is_some();
    if is_pool && cache.persistent {
        return Err(ClaimError::PersistentPool(pool.catalog.clone()));
    }
    if pool.stop_idle_s > MAX_STOP_IDLE_S {
        return Err(ClaimError::LongIdle(pool.catalog.clone()));
    }
    Ok(())
}

fn check(catalog: &str, request: &ClaimRequest) -> Result<(), ClaimError> {
    let is_plain = |text: &str, most: usize| {
        !text.trim().is_empty() && text.chars().count() <= most && !text.chars().any(char::is_control)
    };
    let why = if !is_plain(&request.holder, MAX_HOLDER_CHARS) {
        format!("'for' must be 1 to {MAX_HOLDER_CHARS} characters, without control characters")
    } else if request.key.as_ref().is_some_and(|key| !is_plain(key, MAX_KEY_CHARS)) {
        format!("a key has 1 to {MAX_KEY_CHARS} characters, without control characters")
    } else if request.ttl_s == Some(0) {
        "the claim would end at once, because its time is 0".to_owned()
    } else if request.wait_s.is_some_and(|wait| wait > MAX_CLAIM_WAIT_S) {
        format!("a claim can wait for {MAX_CLAIM_WAIT_S} s at most")
    } else {
        return Ok(());
    };
    Err(ClaimError::Invalid { catalog: catalog.to_owned(), why })
}

/// The key of a request as it is stored: a key of one catalog says nothing of another one. Names of catalogs have no `/`.
fn stored_key(catalog: &str, key: &str) -> String {
    format!("{catalog}/{key}")
}

/// The key as its client gave it.
fn given_key(stored: String) -> String {
    stored.split_once('/').map_or_else(|| stored.clone(), |(_, key)| key.to_owned())
}

/// A claim as clients see it.
fn view(claim: ClaimRecord, machine: &MachineRecord) -> Claim {
    Claim {
        id: claim.id,
        catalog: machine.catalog.clone().unwrap_or_default(),
        machine: machine.name.clone(),
        mac: machine.mac.clone(),
        addresses: Vec::new(),
        console: format!("headwater machine console {}", machine.name),
        secret: None,
        holder: claim.holder,
        key: claim.key.map(given_key),
        claimed_by: claim.claimed_by,
        created_at_ms: claim.created_at_ms,
        expires_at_ms: claim.expires_at_ms,
        reset_on: claim.reset_on,
        ended: claim.ended,
    }
}

/// The result of one search for a machine.
enum Found {
    /// The claim, and whether this request made it.
    Claimed(Box<Claim>, bool),
    /// The number of machines, and the number of claimed ones.
    None(usize, usize),
}

impl Service {
    /// Claims a machine of a catalog for a holder: one that is on, has booted, and was not used since.
    pub(crate) async fn claim(
        &self,
        caller: Caller,
        catalog: String,
        request: ClaimRequest,
    ) -> Result<Claim, ClaimError> {
        check(&catalog, &request)?;
        if self.catalog(&catalog).await?.cache.persistent {
            return Err(ClaimError::Persistent(catalog));
        }
        let wait = Duration::from_secs(request.wait_s.unwrap_or(0));
        let end = Instant::now() + wait;
        let _demand = (!wait.is_zero()).then(|| self.demand(&catalog));
        loop {
            let (service, asking) = (self.clone(), caller.clone());
            let (of, wish) = (catalog.clone(), request.clone());
            // Run to the end: if the client disconnects, no claim may be left half made.
            let found =
                self.to_the_end(async move { service.look_and_claim(&asking, &of, wish).await }).await?;
            let (machines, claimed) = match found {
                Found::Claimed(claim, is_new) if request.secret => {
                    return self.complete_with_secret(caller, *claim, is_new).await;
                }
                Found::Claimed(claim, _) => return self.complete(*claim).await,
                Found::None(machines, claimed) => (machines, claimed),
            };
            if self.is_stopping() {
                return Err(ClaimError::Stopping(catalog));
            }
            if Instant::now() >= end {
                return Err(ClaimError::NoneReady { catalog, machines, claimed });
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Adds the machine's addresses, and the secret if requested.
    async fn complete(&self, mut claim: Claim) -> Result<Claim, ClaimError> {
        // The machine may have switched itself off meanwhile, and its claim ended with it.
        if let Some(active) = self.active_of(&claim).await? {
            claim.addresses = self.addresses_of(&active).await;
        }
        Ok(claim)
    }

    /// The same with a secret. If the guest does not accept the secret, a claim that this request made is ended.
    async fn complete_with_secret(
        &self,
        caller: Caller,
        claim: Claim,
        is_new: bool,
    ) -> Result<Claim, ClaimError> {
        let mut claim = self.complete(claim).await?;
        let service = self.clone();
        // Run to the end: a guest that got a secret which its client never received is reset.
        self.to_the_end(async move {
            // Only one request at a time gives a claim's guest a secret, and ends the claim if that fails.
            let lock = service.claims_state().handovers().entry(claim.id).or_default().clone();
            let mut was_given = lock.lock().await;
            match service.hand_over(&claim).await? {
                Ok(secret) => {
                    *was_given = true;
                    claim.secret = Some(OneTimeSecret(secret));
                    Ok(claim)
                }
                Err(why) => {
                    // A repeated request may have given the machine to its holder meanwhile.
                    let is_to_end = is_new && !*was_given;
                    if let Some(record) = service.running_claim(claim.id).await?.filter(|_| is_to_end) {
                        let why = "its secret could not be given to the guest";
                        service.end_claim(&caller, &record, why).await?;
                    }
                    Err(ClaimError::Secret { machine: claim.machine, why })
                }
            }
        })
        .await
    }

    /// The machine of a claim, if it is on.
    async fn active_of(&self, claim: &Claim) -> Result<Option<Arc<Active>>, DbError> {
        let machine = self.db().read().await?.machines().by_name(&claim.machine).await?;
        Ok(machine.and_then(|machine| self.active(machine.uuid)))
    }

    /// A claim that has not ended.
    async fn running_claim(&self, id: Uuid) -> Result<Option<ClaimRecord>, DbError> {
        let records = self.db().read().await?.claims().list().await?;
        Ok(records.into_iter().find(|record| record.id == id && record.ended.is_none()))
    }

    /// Looks without the turn of a writer whether there is something to claim, so that claims that wait keep nobody from writing. `None`:
    /// there is, or the claim with the key of the request is there.
    async fn nothing_to_claim(
        &self,
        catalog: &str,
        request: &ClaimRequest,
    ) -> Result<Option<Found>, ClaimError> {
        let mut repo = self.db().read().await?;
        let claims = repo.claims().list().await?;
        let stored_key = request.key.as_deref().map(|key| stored_key(catalog, key));
        if stored_key.is_some() && claims.iter().any(|claim| claim.key == stored_key) {
            return Ok(None);
        }
        let claimed: HashSet<Uuid> = claims.iter().map(|claim| claim.machine).collect();
        let members = lendable(self, &mut *repo, catalog).await?;
        if members.iter().any(|machine| self.ready(machine, &claimed).is_some()) {
            return Ok(None);
        }
        let count = members.iter().filter(|machine| claimed.contains(&machine.uuid)).count();
        Ok(Some(Found::None(members.len(), count)))
    }

    /// A machine that can be given to somebody now: it is up, nobody has it, and it was not used since its boot.
    fn ready(&self, machine: &MachineRecord, claimed: &HashSet<Uuid>) -> Option<Arc<Active>> {
        let is_up = machine.wanted == Wanted::Running && machine.state == MachineState::Running;
        // A roll resets a machine that does not run what it is pinned to.
        let is_moved = machine.pin().is_some_and(|pin| machine.version.as_deref() != Some(pin));
        if !is_up || is_moved || claimed.contains(&machine.uuid) {
            return None;
        }
        let is_stopping = self.claims_state().pool.is_stopping(machine.uuid);
        let is_fresh = |active: &Arc<Active>| active.boot_time().is_some() && !active.is_used();
        self.active(machine.uuid).filter(is_fresh).filter(|_| !is_stopping)
    }

    async fn look_and_claim(
        &self,
        caller: &Caller,
        catalog: &str,
        request: ClaimRequest,
    ) -> Result<Found, ClaimError> {
        if let Some(nothing) = self.nothing_to_claim(catalog, &request).await? {
            return Ok(nothing);
        }
        let mut repo = self.db().write().await?;
        let claims = repo.claims().list().await?;
        let stored_key = request.key.as_deref().map(|key| stored_key(catalog, key));
        if let Some(key) = &request.key
            && let Some(claim) = claims.iter().find(|claim| claim.key == stored_key)
        {
            let machine = repo.machines().by_uuid(claim.machine).await?;
            return match machine.filter(|it| it.catalog.as_deref() == Some(catalog) && claim.ended.is_none())
            {
                Some(machine) => Ok(Found::Claimed(Box::new(view(claim.clone(), &machine)), false)),
                None => Err(ClaimError::KeyEnded { catalog: catalog.to_owned(), key: key.clone() }),
            };
        }
        let claimed: HashSet<Uuid> = claims.iter().map(|claim| claim.machine).collect();
        let members = lendable(self, &mut *repo, catalog).await?;
        let count = members.iter().filter(|machine| claimed.contains(&machine.uuid)).count();
        let found = Found::None(members.len(), count);
        for machine in &members {
            let Some(active) = self.ready(machine, &claimed) else { continue };
            let now_ms = self.now_ms();
            let claim = ClaimRecord {
                id: self.new_id()?,
                machine: machine.uuid,
                holder: request.holder,
                key: stored_key,
                claimed_by: caller.principal.clone(),
                created_at_ms: now_ms,
                expires_at_ms: request.ttl_s.map(|ttl| now_ms.saturating_add(ttl.saturating_mul(1000))),
                reset_on: request.reset_on,
                ended: None,
            };
            repo.claims().add(&claim).await?;
            let detail = format!("for {}", claim.holder);
            let event = self.event(caller, format!("machine {}", machine.name), "claimed", detail);
            repo.events().append(event).await?;
            repo.save().await?;
            if !self.is_present(machine.uuid, &active) {
                // It was switched off meanwhile: its claim ends, and another machine is searched.
                self.end_claim(&Caller::daemon(), &claim, "the machine was switched off").await?;
                return Ok(found);
            }
            return Ok(Found::Claimed(Box::new(view(claim, machine)), true));
        }
        Ok(found)
    }

    fn new_id(&self) -> std::io::Result<Uuid> {
        let mut bytes = [0; 16];
        self.random().fill(&mut bytes)?;
        Ok(uuid::Builder::from_random_bytes(bytes).into_uuid())
    }

    /// All claims, or those of one catalog.
    pub(crate) async fn claims(&self, catalog: Option<&str>) -> Result<Vec<Claim>, DbError> {
        let mut repo = self.db().read().await?;
        let claims = repo.claims().list().await?;
        let mut views = Vec::new();
        for claim in claims {
            let machine = repo.machines().by_uuid(claim.machine).await?;
            let is_meant =
                |machine: &MachineRecord| catalog.is_none_or(|it| machine.catalog.as_deref() == Some(it));
            if let Some(machine) = machine.filter(is_meant) {
                let known = self.active(machine.uuid).and_then(|active| active.guest().addresses());
                views.push(Claim { addresses: known.unwrap_or_default(), ..view(claim, &machine) });
            }
        }
        Ok(views)
    }

    /// Ends a claim, given by its id or the name of its machine. The machine is then reset.
    pub(crate) async fn release(&self, caller: &Caller, which: &str) -> Result<Claim, ClaimError> {
        let claims = self.claims(None).await?;
        let id = Uuid::parse_str(which).ok();
        let found = claims.into_iter().find(|claim| Some(claim.id) == id || claim.machine == which);
        let mut claim = found.ok_or_else(|| ClaimError::Unknown(which.to_owned()))?;
        let records = self.db().read().await?.claims().list().await?;
        if let Some(record) = records.into_iter().find(|record| record.id == claim.id) {
            let why = format!("released by {}", caller.principal);
            if self.end_claim(caller, &record, &why).await? {
                claim.ended = Some(why);
            }
        }
        Ok(claim)
    }

    /// Ends a claim, and begins to reset its machine. Returns whether it had not ended before.
    async fn end_claim(&self, caller: &Caller, claim: &ClaimRecord, why: &str) -> Result<bool, DbError> {
        let mut repo = self.db().write().await?;
        let machine = repo.machines().by_uuid(claim.machine).await?;
        let is_new = repo.claims().end(claim.id, why).await?;
        if let Some(machine) = machine.filter(|_| is_new) {
            let detail = format!("of {}: {why}", claim.holder);
            let event = self.event(caller, format!("machine {}", machine.name), "claim ended", detail);
            repo.events().append(event).await?;
        }
        repo.save().await?;
        self.reset_after(claim);
        Ok(is_new)
    }

    /// Begins to reset the machine of a claim that has ended, unless that is in progress.
    fn reset_after(&self, claim: &ClaimRecord) {
        let (id, uuid) = (claim.id, claim.machine);
        if self.is_stopping() || !self.claims_state().resetting().insert(uuid) {
            return;
        }
        let (service, under_way) = (self.clone(), self.begin_operation());
        tokio::spawn(async move {
            let _under_way = under_way;
            if let Err(why) = service.reset_and_free(id, uuid).await {
                tracing::warn!(machine = %uuid, "cannot reset a machine after its claim; it is tried again: {why}");
            }
            service.claims_state().resetting().remove(&uuid);
        });
    }

    /// Removes everything that a holder did on the machine, and frees the machine.
    async fn reset_and_free(&self, id: Uuid, uuid: Uuid) -> Result<(), String> {
        let failed = |e: DbError| problem(&e).to_string();
        let found = async { self.db().read().await?.machines().by_uuid(uuid).await };
        let Some(machine) = found.await.map_err(failed)? else { return Ok(()) };
        let daemon = Caller::daemon();
        // A machine that is off begins with a pristine disk anyway.
        if self.active(uuid).is_some() {
            let is_needed = self.is_short(&machine).await.map_err(failed)?;
            let done = match is_needed {
                true => self.reset(&machine.name, &daemon).await,
                false => self.stop(&machine.name, true, &daemon).await,
            };
            done.map_err(|e| problem(&e).to_string())?;
        }
        let freed = async {
            let mut repo = self.db().write().await?;
            repo.claims().remove(id).await?;
            repo.save().await
        };
        freed.await.map_err(failed)
    }

    /// Ends claims that have expired or whose machines are off, and retries resets.
    pub(crate) async fn look_after_claims(&self) -> Result<(), DbError> {
        let claims = self.db().read().await?.claims().list().await?;
        let is_there = |id: &Uuid| claims.iter().any(|claim| claim.id == *id);
        self.claims_state().handovers().retain(|id, lock| is_there(id) || Arc::strong_count(lock) > 1);
        for claim in claims {
            if self.is_elsewhere(claim.machine).await? {
                continue;
            }
            if claim.ended.is_some() {
                self.reset_after(&claim);
                continue;
            }
            let daemon = Caller::daemon();
            if claim.expires_at_ms.is_some_and(|end| end <= self.now_ms()) {
                self.end_claim(&daemon, &claim, "its time is over").await?;
            } else if self.is_off(claim.machine).await? {
                self.end_claim(&daemon, &claim, "the machine is off").await?;
            } else if let Some(active) = self.active(claim.machine) {
                self.look_at_guest(claim, &active);
            }
        }
        Ok(())
    }

    /// Asks the guest of a claimed machine for addresses and users, and ends the claim if its user has logged off.
    fn look_at_guest(&self, claim: ClaimRecord, active: &Arc<Active>) {
        drop(self.learn_addresses(active));
        if claim.reset_on != ResetOn::Logoff {
            return;
        }
        let (service, active) = (self.clone(), Arc::clone(active));
        // In a task of its own, because a guest may be slow. A daemon that ends does not wait for the answer.
        tokio::spawn(async move {
            if !service.has_logged_off(&active).await {
                return;
            }
            let _under_way = service.begin_operation();
            let ended = service.end_claim(&Caller::daemon(), &claim, "its user has logged off").await;
            if let Err(error) = ended {
                tracing::warn!(machine = %claim.machine, "cannot end the claim of a user who has logged off; it is tried again: {}", problem(&error));
            }
        });
    }

    /// Whether a machine is off, and no task is about to switch it on.
    async fn is_off(&self, uuid: Uuid) -> Result<bool, DbError> {
        if self.active(uuid).is_some() || self.is_restarting(uuid) {
            return Ok(false);
        }
        let machine = self.db().read().await?.machines().by_uuid(uuid).await?;
        // While another task holds its lock, it may be between off and on.
        let is_idle = self.try_lock(uuid).is_some() && self.active(uuid).is_none();
        Ok(is_idle && machine.is_none_or(|machine| !machine.state.is_active()))
    }

    /// Whether a machine belongs to another host, whose daemon manages its claims.
    async fn is_elsewhere(&self, machine: Uuid) -> Result<bool, DbError> {
        let machine = self.db().read().await?.machines().by_uuid(machine).await?;
        Ok(machine.is_some_and(|machine| !self.is_own(&machine)))
    }

    /// Ends the claims of machines that stopped together with an earlier daemon.
    pub(crate) async fn end_claims_of_former(&self) -> Result<(), DbError> {
        let mut repo = self.db().write().await?;
        let claims = repo.claims().list().await?;
        for claim in claims {
            if self.active(claim.machine).is_some() {
                continue;
            }
            let machine = repo.machines().by_uuid(claim.machine).await?;
            // The controller of that host knows its state.
            if machine.as_ref().is_some_and(|machine| !self.is_own(machine)) {
                continue;
            }
            repo.claims().remove(claim.id).await?;
            if let Some(machine) = machine {
                let detail = format!(
                    "the claim of {} ended: its machine stopped together with an earlier daemon",
                    claim.holder
                );
                let subject = format!("machine {}", machine.name);
                let event = self.event(&Caller::daemon(), subject, "claim ended", detail);
                repo.events().append(event).await?;
            }
        }
        repo.save().await
    }

    /// The holders of claimed machines.
    pub(crate) async fn holders(&self) -> Result<HashMap<Uuid, String>, DbError> {
        let claims = self.db().read().await?.claims().list().await?;
        Ok(claims.into_iter().map(|claim| (claim.machine, claim.holder)).collect())
    }
}

/// The machines of a catalog that can be claimed: virtual ones of this host that begin each boot with a pristine disk.
async fn lendable(
    service: &Service,
    repo: &mut dyn Repository,
    catalog: &str,
) -> Result<Vec<MachineRecord>, DbError> {
    let disks = repo.persistent_disks().list().await?;
    let keeping: HashSet<Uuid> = disks.into_iter().map(|disk| disk.machine).collect();
    let mut machines = repo.machines().of_catalog(catalog).await?;
    machines.retain(|machine| {
        let is_member = machine.boot == BootFrom::Vm && service.is_own(machine);
        is_member && !machine.cache.persistent && !keeping.contains(&machine.uuid)
    });
    Ok(machines)
}
