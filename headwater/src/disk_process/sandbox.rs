//! What the disk process may do from the moment on at which it knows its settings: it gives up everything else.
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

/// The Landlock that this was written for: Linux 6.15.
const NEWEST: ABI = ABI::V7;

/// Capabilities that are kept: a store or a cache may belong to another user, and keys are locked in memory.
const KEPT: [Capability; 2] = [Capability::CAP_DAC_OVERRIDE, Capability::CAP_IPC_LOCK];

/// What every process reads: memory limits and pressure, processors, libraries, and random numbers.
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

/// What is read to reach hosts by name and to trust them.
const NETWORK: [&str; 4] = ["/etc", "/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager"];

/// Variables that name files with keys of a bucket.
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

/// What the process needs for its settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Directories and files that are read.
    pub read: Vec<PathBuf>,
    /// Files that may be replaced by others of the same name.
    pub replaced: Vec<PathBuf>,
    /// Directories that are written. They are made, for their owner only, if they are missing.
    pub write: Vec<PathBuf>,
    /// Directories with a directory for each machine, in which its socket is made.
    pub listen: Vec<PathBuf>,
    /// No directory that has this in it may be read as a whole.
    pub guarded: PathBuf,
    /// The store is across a network.
    pub network: bool,
}

/// What was given up.
#[derive(Debug)]
pub struct Sandbox {
    /// Which part of the file system rules the kernel enforces.
    files: RulesetStatus,
    /// Why there is no filter of system calls, if there is none.
    unfiltered: Option<String>,
    /// The directories of the settings, and which ones they were.
    roots: Vec<(PathBuf, Option<(u64, u64)>)>,
}

impl Needs {
    /// Gives up everything else, for this thread and those that it starts.
    pub fn restrict(&self) -> anyhow::Result<Sandbox> {
        for dir in &self.write {
            // Whoever opens it says why it cannot be made.
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
        // A panic names its place with the symbols of the program.
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

    /// The directories of a file that may be replaced: the one that it has now, and the one of its path, in which a symbolic link may
    /// lead to another one tomorrow. If too much else is in a directory, it is the file as it is now instead.
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

/// Device and number of what is at a path.
fn identity(path: &Path) -> Option<(u64, u64)> {
    path.metadata().ok().map(|found| (found.dev(), found.ino()))
}

impl Sandbox {
    /// Whether a directory of the settings appeared, or was replaced, since. The rules are about what was there before, so only
    /// another process can use it.
    pub fn has_moved(&self) -> bool {
        self.files != RulesetStatus::NotEnforced
            && self.roots.iter().any(|(path, then)| {
                let now = identity(path);
                now.is_some() && now != *then
            })
    }

    /// Says in the log what the kernel could not take away.
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

/// How much of Landlock the running kernel has. `None`: all that is used. Otherwise the version, which is 0 if there is none.
pub fn landlock_lacks() -> Option<u8> {
    let has = |abi| {
        let rules = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
        rules.handle_access(AccessFs::from_all(abi)).is_ok()
    };
    let scopes = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    if scopes.scope(Scope::from_all(NEWEST)).is_ok() {
        return None;
    }
    // Each of these brought rights of files, so it can be told whether it is there.
    let known = [(ABI::V5, 5), (ABI::V3, 3), (ABI::V2, 2), (ABI::V1, 1)];
    Some(known.into_iter().find(|(abi, _)| has(*abi)).map_or(0, |(_, version)| version))
}

#[cfg(test)]
mod tests;
