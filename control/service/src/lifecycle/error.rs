//! The error of a change of a machine's state, with its kind and advice. All of `lifecycle` returns it, and the operations answer with
//! it.

use headwater_api::{Problem, ProblemKind};
use headwater_db::DbError;

use crate::answer::Explain;
use crate::backend::BackendError;
use crate::identity::IdentityError;

/// A failed change of a machine's state.
#[derive(Debug, thiserror::Error)]
pub enum LifecycleError {
    /// No machine of that name.
    #[error("there is no machine '{0}'")]
    Unknown(String),
    /// Its image reference is not valid any more.
    #[error("cannot start machine '{machine}'")]
    Reference {
        /// The machine.
        machine: String,
        /// Why.
        #[source]
        source: Problem,
    },
    /// It boots from the network, so the daemon cannot do that to it.
    #[error("cannot {what} machine '{machine}': it boots from the network, so the daemon does not run it")]
    Target {
        /// What was to be done.
        what: &'static str,
        /// The machine.
        machine: String,
    },
    /// The node of its host is not connected.
    #[error("cannot {what} machine '{machine}': host '{host}' is not connected, and {since}")]
    Away {
        /// What was to be done.
        what: &'static str,
        /// The machine.
        machine: String,
        /// Its host.
        host: String,
        /// Since when.
        since: String,
    },
    /// It belongs to another host, and only the controller's own host can do that.
    #[error(
        "cannot {what} machine '{machine}': it is on host '{host}', and this works only for machines of the controller's own host"
    )]
    Elsewhere {
        /// What was to be done.
        what: &'static str,
        /// The machine.
        machine: String,
        /// Its host.
        host: String,
    },
    /// It is in a cloud, and only a machine on a host can do that.
    #[error(
        "cannot {what} machine '{machine}': it is in the cloud of connection '{connection}', and this works only for machines on hosts"
    )]
    InCloud {
        /// What was to be done.
        what: &'static str,
        /// The machine.
        machine: String,
        /// The connection.
        connection: String,
    },
    /// The version that it boots is not published in its cloud.
    #[error("cannot {what} machine '{machine}': {version} is not published to connection '{connection}'")]
    NotPublished {
        /// What was to be done.
        what: &'static str,
        /// The machine.
        machine: String,
        /// The version, as `IMAGE@NUMBER`.
        version: String,
        /// The connection.
        connection: String,
    },
    /// The daemon stops, or the machine is stopped by force, while the cloud works.
    #[error("the cloud has not finished to {what} machine '{machine}': {why}")]
    CloudLeft {
        /// What is being done.
        what: &'static str,
        /// The machine.
        machine: String,
        /// Why nobody waits for it any more.
        why: &'static str,
    },
    /// The lease of this node is over, so another host may run the machine.
    #[error(
        "cannot start machine '{0}': this node has had no contact with its controller for the time of its lease, and another host may run the machine"
    )]
    FencedOff(String),
    /// The node of its host failed.
    #[error("cannot {what} machine '{machine}' on host '{host}'")]
    Remote {
        /// What was to be done.
        what: &'static str,
        /// The machine.
        machine: String,
        /// Its host.
        host: String,
        /// Why.
        #[source]
        source: Box<Problem>,
    },
    /// It must be off to be removed.
    #[error("cannot remove machine '{machine}': it is {state}")]
    NotOff {
        /// The machine.
        machine: String,
        /// What it does.
        state: &'static str,
    },
    /// It must be on.
    #[error("cannot {what} machine '{machine}': it is {state}")]
    NotOn {
        /// What was to be done.
        what: &'static str,
        /// The machine.
        machine: String,
        /// What it does.
        state: &'static str,
    },
    /// It must be off.
    #[error("cannot {what}: machine '{machine}' is {state}")]
    StillOn {
        /// What was to be done: `seal image 'debian'`.
        what: String,
        /// The machine.
        machine: String,
        /// What it does.
        state: &'static str,
    },
    /// It is in a maintenance session.
    #[error("cannot {what} machine '{machine}': it edits image '{image}'")]
    Edits {
        /// What was to be done.
        what: &'static str,
        /// The machine.
        machine: String,
        /// The image.
        image: String,
    },
    /// Its persistent disk contains its SSH host key.
    #[error("cannot rotate the SSH host key of machine '{machine}': its persistent disk contains the key")]
    KeepsKeys {
        /// The machine.
        machine: String,
    },
    /// No key could be made.
    #[error("cannot rotate the SSH host key of machine '{machine}'")]
    NoKeys {
        /// The machine.
        machine: String,
        /// Why.
        #[source]
        source: IdentityError,
    },
    /// Another machine has the maintenance session of the image.
    #[error("cannot edit image '{image}' on machine '{machine}': machine '{holder}' edits it already")]
    Held {
        /// The image.
        image: String,
        /// The machine that was to edit it.
        machine: String,
        /// The machine that edits it.
        holder: String,
    },
    /// The image has no maintenance session.
    #[error("cannot {what}: no machine edits image '{image}'")]
    NoEdit {
        /// What was to be done.
        what: &'static str,
        /// The image.
        image: String,
    },
    /// Its session's version is not the newest any more.
    #[error(
        "cannot seal {what} over {parent}: {newer} is newer, and its changes would not be in the new version"
    )]
    Newer {
        /// What was to be sealed: `image 'debian'`.
        what: String,
        /// The image.
        image: String,
        /// The version below, as `IMAGE@NUMBER`.
        parent: String,
        /// The newest version.
        newer: String,
    },
    /// Its machine's identity could not be removed in the guest.
    #[error("cannot seal image '{image}': the identity of machine '{machine}' was not removed in its guest")]
    NotGeneralised {
        /// The image.
        image: String,
        /// The machine.
        machine: String,
        /// Why.
        #[source]
        source: BackendError,
    },
    /// Its guest did not shut down after the removal.
    #[error("cannot seal image '{image}': machine '{machine}' did not shut down, and was ended: {how}")]
    NotInOrder {
        /// The image.
        image: String,
        /// The machine.
        machine: String,
        /// What happened.
        how: String,
    },
    /// Its machine's identity is still on its disk.
    #[error("cannot seal {what}: the identity of machine '{machine}' is on its disk: {}", .found.join(", "))]
    KeepsIdentity {
        /// What was to be sealed: `image 'debian'`.
        what: String,
        /// The image, if it has a maintenance session.
        image: Option<String>,
        /// The machine.
        machine: String,
        /// What was found.
        found: Vec<String>,
    },
    /// Its requests cannot be recorded, because it is on.
    #[error(
        "cannot record the requests of machine '{0}': it is on, and a recording begins when a machine starts"
    )]
    OnAndNotRecorded(String),
    /// A version is being made of its disk.
    #[error("cannot {what} machine '{machine}': a version is being made of its disk")]
    BeingSealed {
        /// What was to be done.
        what: &'static str,
        /// The machine.
        machine: String,
    },
    /// The version was made, but the maintenance session is still recorded.
    #[error("sealed as {version}, but the maintenance session could not be ended")]
    EditStays {
        /// The version, as `IMAGE@NUMBER`.
        version: String,
        /// Why.
        #[source]
        source: Box<LifecycleError>,
    },
    /// Its session was sealed before, and was ended only now.
    #[error(
        "cannot start machine '{machine}' on the private disk of its maintenance session: the disk was sealed as {version}"
    )]
    EditOver {
        /// The machine.
        machine: String,
        /// The image.
        image: String,
        /// The version, as `IMAGE@NUMBER`.
        version: String,
    },
    /// The daemon is stopping.
    #[error("cannot start machine '{0}': the daemon is stopping")]
    Stopping(String),
    /// A disk, an image or the hypervisor failed.
    #[error("cannot {what} machine '{machine}'")]
    Backend {
        /// What was to be done.
        what: &'static str,
        /// The machine.
        machine: String,
        /// Why.
        #[source]
        source: BackendError,
    },
    /// The remains of an earlier daemon could not be cleaned up.
    #[error("cannot {0}")]
    Orphans(&'static str, #[source] BackendError),
    /// The database is new or another one: cleaning up would destroy data of machines.
    #[error(
        "the database has no machines, but there are {count} persistent disks, the first with the key {first} \
         (restore the database from its backup, or move cache/disk-* and keys/disk-* of the data \
         directory away)"
    )]
    Forgotten {
        /// The number of persistent disks.
        count: usize,
        /// The key file of one of them.
        first: String,
    },
    /// The database failed before the machine was on.
    #[error("cannot start machine '{machine}'")]
    NotNoted {
        /// The machine.
        machine: String,
        /// Why.
        #[source]
        source: DbError,
    },
    /// The machine is on, but the database could not record that.
    #[error("machine '{machine}' is on, but the database could not record that")]
    OnNotNoted {
        /// The machine.
        machine: String,
        /// Why.
        #[source]
        source: DbError,
    },
    /// The machine is off, but the database could not record that.
    #[error("machine '{machine}' is off, but the database could not record that")]
    OffNotNoted {
        /// The machine.
        machine: String,
        /// Why.
        #[source]
        source: DbError,
    },
    /// The database failed during a reset, after the machine was off.
    #[error("machine '{machine}' is off, but its reset was not completed")]
    OffNotReset {
        /// The machine.
        machine: String,
        /// Why.
        #[source]
        source: DbError,
    },
    /// The machine's disk has new limits, but the database could not record them.
    #[error("machine '{machine}' has the new limits until it is off, but the database could not record them")]
    LimitsNotNoted {
        /// The machine.
        machine: String,
        /// Why.
        #[source]
        source: DbError,
    },
    /// The database failed.
    #[error(transparent)]
    Db(#[from] DbError),
}

impl LifecycleError {
    pub(crate) fn backend(what: &'static str, machine: &str) -> impl FnOnce(BackendError) -> Self {
        let machine = machine.to_owned();
        move |source| Self::Backend { what, machine, source }
    }

    /// Whether the database of this daemon failed.
    pub(crate) fn is_of_database(&self) -> bool {
        matches!(
            self,
            Self::Db(_)
                | Self::NotNoted { .. }
                | Self::OnNotNoted { .. }
                | Self::OffNotNoted { .. }
                | Self::OffNotReset { .. }
        )
    }
}

impl Explain for LifecycleError {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::Unknown(_) => ProblemKind::NotFound,
            Self::Reference { source, .. } => source.kind,
            Self::Remote { source, .. } => source.kind,
            Self::Away { .. } | Self::FencedOff(_) | Self::CloudLeft { .. } => ProblemKind::Unavailable,
            Self::Target { .. }
            | Self::Elsewhere { .. }
            | Self::InCloud { .. }
            | Self::NotPublished { .. }
            | Self::NotOff { .. }
            | Self::NotOn { .. }
            | Self::StillOn { .. }
            | Self::Edits { .. }
            | Self::KeepsKeys { .. }
            | Self::Held { .. }
            | Self::Newer { .. }
            | Self::NotGeneralised { .. }
            | Self::NotInOrder { .. }
            | Self::KeepsIdentity { .. }
            | Self::BeingSealed { .. }
            | Self::OnAndNotRecorded(_)
            | Self::EditOver { .. }
            | Self::Forgotten { .. } => ProblemKind::Conflict,
            Self::NoKeys { .. } => ProblemKind::Failed,
            Self::EditStays { source, .. } => source.kind(),
            Self::NoEdit { .. } => ProblemKind::NotFound,
            Self::Stopping(_) => ProblemKind::Unavailable,
            Self::Backend { source, .. } | Self::Orphans(_, source) => source.kind(),
            Self::Db(source)
            | Self::NotNoted { source, .. }
            | Self::OnNotNoted { source, .. }
            | Self::OffNotNoted { source, .. }
            | Self::OffNotReset { source, .. }
            | Self::LimitsNotNoted { source, .. } => source.kind(),
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::Away { .. } => Some(
                "'headwater node list' shows the hosts; nothing was changed".to_owned(),
            ),
            Self::Remote { source, .. } => source.advice.clone(),
            Self::InCloud { .. } => Some("use SSH, or Microsoft's tools".to_owned()),
            Self::NotPublished { version, connection, .. } => {
                Some(format!("'headwater image publish {version} --connection {connection}' publishes it"))
            }
            Self::FencedOff(_) => Some(
                "start it when the controller is connected again; 'headwater catalog set CATALOG --on-host-loss wait' lets machines keep running \
                 without it"
                    .to_owned(),
            ),
            Self::Unknown(_) => Some("'headwater machine list' shows all machines".to_owned()),
            Self::Target { what: "start" | "reset", .. } => Some(
                "switch the computer itself on; each time it boots, it starts with a fresh disk".to_owned(),
            ),
            Self::Target { .. } => Some("use a machine that the daemon runs (--boot vm)".to_owned()),
            Self::NotOff { machine, .. } => {
                Some(format!("stop it first ('headwater machine stop {machine}'), or use --force"))
            }
            Self::StillOn { machine, .. } => {
                Some(format!("stop it first: 'headwater machine stop {machine}'"))
            }
            Self::KeepsKeys { machine } => Some(format!(
                "'headwater machine reset {machine}' discards the disk with everything on it; then repeat this"
            )),
            Self::Edits { image, .. } => Some(format!(
                "'headwater image seal {image}' makes a version of its disk, 'headwater image discard {image}' \
                 discards its changes"
            )),
            Self::Held { image, holder, .. } => Some(format!(
                "seal or discard the session of '{holder}' first: 'headwater image seal {image}', 'headwater image discard \
                 {image}'"
            )),
            Self::NoEdit { image, .. } => {
                Some(format!("'headwater image edit {image} --machine MACHINE' begins a maintenance session"))
            }
            Self::Newer { image, newer, .. } => Some(format!(
                "discard the session ('headwater image discard {image}') and edit {newer}, or seal it anyway with \
                 --over-newer"
            )),
            Self::NotGeneralised { image, machine, source } => {
                let advice = source.advice().map(|advice| format!("{advice}; or ")).unwrap_or_default();
                Some(format!(
                    "{advice}stop it first ('headwater machine stop {machine}') and seal: 'headwater image seal {image}' of a machine that is \
                     off looks for the identity on its disk"
                ))
            }
            Self::NotInOrder { image, machine, .. } => Some(format!(
                "'headwater image seal {image}' seals its disk as it is; or start the machine, check that nothing is missing, and seal again: 'headwater machine \
                 start {machine}'"
            )),
            Self::KeepsIdentity { image: Some(image), machine, .. } => Some(format!(
                "start it ('headwater machine start {machine} --wait') and seal while it is on: 'headwater image seal {image}' removes the identity \
                 in the guest and switches the machine off; or keep the identity in the version with --keep-identity"
            )),
            Self::KeepsIdentity { .. } => {
                Some("--keep-identity makes a version that is marked as not generalised".to_owned())
            }
            Self::OnAndNotRecorded(machine) => Some(format!("stop it first: 'headwater machine stop {machine}'")),
            Self::BeingSealed { .. } => Some("try again when the version is made".to_owned()),
            Self::EditStays { .. } => Some(
                "the session ends with the next seal of the image, the next start of its machine or the next start of the daemon"
                    .to_owned(),
            ),
            Self::EditOver { machine, image, .. } => Some(format!(
                "the session is over: 'headwater image edit {image} --machine {machine}' begins a new one, 'headwater \
                 machine start {machine}' starts without one"
            )),
            Self::NotOn { machine, .. } => Some(format!("start it: 'headwater machine start {machine}'")),
            Self::Backend { source, .. } | Self::Orphans(_, source) => source.advice().map(str::to_owned),
            Self::NotNoted { source: source @ (DbError::NoSpace(_) | DbError::Away { .. } | DbError::Unsure { .. }), .. } => source.advice(),
            Self::NotNoted { machine, .. } => Some(format!(
                "'headwater machine show {machine}' shows its state; start it again when no other process holds the \
                 database"
            )),
            Self::OnNotNoted { machine, .. } => Some(format!(
                "the machine keeps running, and this is recorded when the database can be written: 'headwater machine show {machine}'"
            )),
            Self::OffNotNoted { .. } => {
                Some("the machine is recorded as lost when the database can be written, and can then be started".to_owned())
            }
            Self::OffNotReset { machine, source } => {
                let again = format!(
                    "'headwater machine reset {machine}' discards its disk, 'headwater machine start {machine}' starts it"
                );
                Some(source.advice().map_or_else(|| again.clone(), |advice| format!("{advice}; then {again}")))
            }
            Self::LimitsNotNoted { source, .. } => {
                let again = "set them again when the database can be written, so that later starts have them";
                Some(source.advice().map_or_else(|| again.to_owned(), |advice| format!("{advice}, and {again}")))
            }
            Self::Db(source) => source.advice(),
            Self::Elsewhere { .. } | Self::CloudLeft { .. } | Self::NoKeys { .. } | Self::Reference { .. } | Self::Stopping(_) | Self::Forgotten { .. } => None,
        }
    }

    fn retry_after_s(&self) -> Option<u32> {
        match self {
            Self::Db(source) | Self::NotNoted { source, .. } => source.retry_after_s(),
            // The change was made, so the client must not repeat it.
            _ => None,
        }
    }
}
