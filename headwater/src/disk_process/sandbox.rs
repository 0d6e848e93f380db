//! Restricts the disk process once it knows its settings: it gives up all permissions that these settings do not
//! need.
//!
//! | means | takes away |
//! |---|---|
//! | capabilities | all except those of [`KEPT`], which it has only if it runs as root |
//! | Landlock | files outside of [`Needs`]; TCP, unless the store is across a network; abstract sockets and signals of others |
//! | seccomp ([`super::system_calls`]) | programs, processes, other sockets, and system calls that no disk needs |
//!
//! All three count for the calling thread and the threads that it starts. So [`Needs::restrict`] comes before any other thread.
//! A kernel without Landlock, or with an early one, takes away less; [`Sandbox::log`] says so.

use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use caps::{CapSet, Capability, CapsHashSet};
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetStatus, Scope, make_bitflags,
};

use super::system_calls;

/// The version of Landlock that these rules are written for: Linux 6.15.
const NEWEST: ABI = ABI::V7;

/// The capabilities that are kept: files of a store or cache may belong to another user, and keys are locked in memory.
const KEPT: [Capability; 2] = [Capability::CAP_DAC_OVERRIDE, Capability::CAP_IPC_LOCK];

/// Paths that each process reads: memory limits and pressure, processors, libraries, and random numbers.
const SYSTEM: [&str; 8] = [
    "/proc",
    "/sys/fs/cgroup",
    "/sys/devices/system",
    "/usr",
    "/lib",
    "/lib64",
    "/dev/urandom",
    "/etc/ld.so.cache",
];

/// Paths that are read to resolve host names and to check certificates.
const NETWORK: [&str; 4] = ["/etc", "/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager"];

/// Environment variables that name files with the keys of a bucket.
const KEY_FILES: [&str; 4] = [
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
];

const READ: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadFile | ReadDir});

const WRITE: BitFlags<AccessFs> = make_bitflags!(AccessFs::{
    ReadFile | ReadDir | WriteFile | Truncate | MakeReg | MakeDir | RemoveFile | RemoveDir | Refer
});

const LISTEN: BitFlags<AccessFs> = make_bitflags!(AccessFs::{MakeSock | RemoveFile});

/// The files and network that the process needs for its settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Directories and files that are read.
    pub read: Vec<PathBuf>,
    /// Files that may be replaced by others of the same name.
    pub replaced: Vec<PathBuf>,
    /// Directories that are written. Missing ones are created, for their owner only.
    pub write: Vec<PathBuf>,
    /// Directories that have a directory for each machine, in which the machine's socket is created.
    pub listen: Vec<PathBuf>,
    /// A path: no directory that contains it may be readable as a whole.
    pub guarded: PathBuf,
    /// Whether the store is reached over a network.
    pub network: bool,
}

/// The restrictions that are in force.
#[derive(Debug)]
pub struct Sandbox {
    /// The file rules that the kernel enforces.
    files: RulesetStatus,
    /// Why system calls are not filtered. `None`: they are.
    unfiltered: Option<String>,
    /// The directories of the settings, with their device and inode numbers when the rules were made.
    roots: Vec<(PathBuf, Option<(u64, u64)>)>,
}

impl Needs {
    /// Gives up all other permissions, for this thread and the threads that it starts.
    pub fn restrict(&self) -> anyhow::Result<Sandbox> {
        for dir in &self.write {
            // If this fails, opening the directory later reports why.
            let _ = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
        }
        let roots = [&self.read, &self.write, &self.listen].into_iter().flatten();
        let roots = roots.map(|path| (path.clone(), identity(path))).collect();
        give_up_capabilities().context("cannot give up capabilities")?;
        let files = self.landlock().context("cannot restrict access to files")?;
        let unfiltered = match system_calls::deny(self.network) {
            Ok(true) => None,
            Ok(false) => Some("there is no filter for this processor".to_owned()),
            Err(error) => Some(format!("{error:#}")),
        };
        Ok(Sandbox { files, unfiltered, roots })
    }

    fn landlock(&self) -> anyhow::Result<RulesetStatus> {
        let mut rules = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(NEWEST))?
            .handle_access(AccessNet::BindTcp)?
            .scope(Scope::from_all(NEWEST))?;
        if !self.network {
            rules = rules.handle_access(AccessNet::ConnectTcp)?;
        }
        let mut rules = rules.create()?;
        let variables = KEY_FILES.iter().filter_map(std::env::var_os).map(PathBuf::from);
        let program = std::env::current_exe();
        // A panic message needs the symbols of the program for its backtrace.
        let mut read: Vec<PathBuf> = SYSTEM.iter().map(PathBuf::from).chain(program).collect();
        read.extend(self.read.iter().cloned());
        read.extend(self.replaced.iter().flat_map(|file| self.around(file)));
        if self.network {
            read.extend(NETWORK.iter().map(PathBuf::from));
            read.extend(variables.flat_map(|file| self.around(&file)));
        }
        for (paths, access) in [(&read, READ), (&self.write, WRITE), (&self.listen, LISTEN)] {
            for path in paths {
                rules = allow(rules, path, access)?;
            }
        }
        Ok(rules.restrict_self()?.ruleset)
    }

    /// The directories of a file that may be replaced: its present directory, and that of its path, in which a
    /// symbolic link may lead to another directory later. If a directory has too much else in it, the file itself is
    /// allowed instead.
    fn around(&self, file: &Path) -> [PathBuf; 2] {
        let guarded = self.guarded.canonicalize().unwrap_or_else(|_| self.guarded.clone());
        let parent_of = |file: &Path| {
            let parent = file.parent().and_then(|parent| parent.canonicalize().ok());
            parent.filter(|parent| !guarded.starts_with(parent)).unwrap_or_else(|| file.to_owned())
        };
        [parent_of(&file.canonicalize().unwrap_or_else(|_| file.to_owned())), parent_of(file)]
    }
}

fn allow(rules: RulesetCreated, path: &Path, access: BitFlags<AccessFs>) -> anyhow::Result<RulesetCreated> {
    // A path that is missing needs no rule; `Sandbox::has_moved` notices when it appears.
    let Ok(opened) = PathFd::new(path) else { return Ok(rules) };
    let access = if path.is_dir() { access } else { access & AccessFs::from_file(NEWEST) };
    rules
        .add_rule(PathBeneath::new(opened, access))
        .with_context(|| format!("no rule for {}", path.display()))
}

fn give_up_capabilities() -> Result<(), caps::errors::CapsError> {
    let kept = |set| {
        caps::read(None, set)
            .map(|now| KEPT.into_iter().filter(|one| now.contains(one)).collect::<CapsHashSet>())
    };
    caps::set(None, CapSet::Effective, &kept(CapSet::Effective)?)?;
    caps::set(None, CapSet::Permitted, &kept(CapSet::Permitted)?)?;
    caps::clear(None, CapSet::Inheritable)
}

/// The device and inode numbers of a path.
fn identity(path: &Path) -> Option<(u64, u64)> {
    path.metadata().ok().map(|found| (found.dev(), found.ino()))
}

impl Sandbox {
    /// Whether a directory of the settings was created or replaced since. The rules apply to the earlier directory, so
    /// only a new process can use the new one.
    pub fn has_moved(&self) -> bool {
        self.files != RulesetStatus::NotEnforced
            && self.roots.iter().any(|(path, then)| {
                let now = identity(path);
                now.is_some() && now != *then
            })
    }

    /// Logs which restrictions the kernel does not support.
    pub fn log(&self) {
        match self.files {
            RulesetStatus::FullyEnforced => {
                tracing::debug!("files, sockets and signals are restricted by Landlock")
            }
            RulesetStatus::PartiallyEnforced => tracing::info!(
                "files are restricted by Landlock, but this kernel does not know all of its rules: Linux 6.12 and later do"
            ),
            RulesetStatus::NotEnforced => tracing::warn!(
                "this kernel has no Landlock: the disk process can open every file that its user can; 'headwater doctor' says what to do"
            ),
        }
        if let Some(why) = &self.unfiltered {
            tracing::warn!("system calls of the disk process are not restricted: {why}");
        }
    }
}

/// The newest version of Landlock that the kernel has, 0 for none. `None`: it has everything that is used.
pub fn landlock_lacks() -> Option<u8> {
    let has = |abi| {
        let rules = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
        rules.handle_access(AccessFs::from_all(abi)).is_ok()
    };
    let scopes = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    if scopes.scope(Scope::from_all(NEWEST)).is_ok() {
        return None;
    }
    // Each of these versions added file rights, so its presence can be detected.
    let known = [(ABI::V5, 5), (ABI::V3, 3), (ABI::V2, 2), (ABI::V1, 1)];
    Some(known.into_iter().find(|(abi, _)| has(*abi)).map_or(0, |(_, version)| version))
}

#[cfg(test)]
mod tests;
