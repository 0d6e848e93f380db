//! Suggests how to make a machine's write cache smaller, from what occupies it.

use headwater_api::{CacheContents, CacheHint, ContentsKind, PathContents};

/// Smaller amounts give no hint.
const LEAST_BYTES: u64 = 32 << 20;
/// Smaller percentages of the write cache give no hint.
const LEAST_PERCENT: u64 = 5;
/// The most hints.
const HINTS_MAX: usize = 8;

/// Directories that often fill a write cache (lower case, from the root of a file system), and what to do about each.
const DIRECTORIES: [(&str, &str); 12] = [
    ("/var/log/journal", "set SystemMaxUse= in /etc/systemd/journald.conf of the image"),
    ("/var/log", "rotate logs earlier in the image, or send them to another computer"),
    ("/var/cache/apt", "run 'apt-get clean' before the seal, and install packages in a maintenance session"),
    (
        "/var/cache/dnf",
        "run 'dnf clean all' before the seal and disable dnf-makecache.timer; install packages in a maintenance session",
    ),
    ("/var/lib/docker", "pull container images in a maintenance session, or keep them on another disk"),
    ("/tmp", "mount it as tmpfs in the image"),
    ("/var/tmp", "find the program that leaves files there"),
    (
        "/windows/softwaredistribution",
        "switch Windows Update off in the image, and update in a maintenance session",
    ),
    ("/windows/temp", "find the program that leaves files there"),
    ("/programdata/microsoft/search", "switch the search index off in the image"),
    ("/programdata/microsoft/windows defender", "update the signatures in a maintenance session"),
    ("/system volume information", "switch shadow copies and restore points off in the image"),
];

/// A directory of this name exists for each user.
const OF_USERS: (&str, &str) = (
    "/.cache",
    "make the caches of browsers and desktops smaller in the image, or put home directories on another disk",
);

/// What to do about a directory, if that is known.
fn remedy(path: &str) -> Option<&'static str> {
    let path = path.to_ascii_lowercase();
    let rooted = DIRECTORIES.iter().find(|(rooted, _)| *rooted == path);
    rooted.or_else(|| path.ends_with(OF_USERS.0).then_some(&OF_USERS)).map(|(_, what)| *what)
}

/// Whether one directory contains the other, in the same partition.
fn is_above(above: &PathContents, below: &PathContents) -> bool {
    let rest = below.path.strip_prefix(&above.path);
    above.partition == below.partition && rest.is_some_and(|rest| rest.starts_with('/'))
}

/// Suggestions, the largest gain first. Commands in the guest are suggested only while the machine is on.
pub fn hints(contents: &CacheContents, machine: &str, is_on: bool) -> Vec<CacheHint> {
    let all = contents.held.total_bytes;
    let counts = |bytes: u64| bytes >= LEAST_BYTES && bytes >= all / 100 * LEAST_PERCENT;
    let mut found: Vec<(u64, CacheHint)> = Vec::new();
    let mut add = |bytes: u64, message: String, command: Option<String>| {
        if counts(bytes) {
            found.push((bytes, CacheHint { message, command }));
        }
    };
    let free = |is_ntfs: bool| {
        let is_its = |file_system: &str| (file_system == "NTFS") == is_ntfs;
        let its = contents.partitions.iter().filter(|partition| is_its(&partition.file_system));
        its.map(|partition| partition.free_bytes).sum::<u64>()
    };
    let trims = [
        (free(false), "fstrim", format!("headwater machine trim {machine}")),
        (free(true), "defrag", format!("headwater machine exec {machine} -- defrag /C /L")),
    ];
    for (bytes, trim, command) in trims {
        let message = format!("{trim} in the guest frees up to {} of deleted files", size(bytes));
        add(bytes, message, is_on.then_some(command));
    }
    for kind in &contents.kinds {
        let bytes = kind.held.total_bytes;
        let share = format!("{} ({} %)", size(bytes), percent(bytes, all));
        match kind.kind {
            ContentsKind::Swap => {
                let message = format!(
                    "swap or the page file occupies {share}: move it to a disk without a write cache, make it smaller, or give the machine more memory"
                );
                add(bytes, message, None);
            }
            ContentsKind::Journal => {
                let message =
                    format!("the journal of the file system occupies {share}: make it smaller in the image");
                add(bytes, message, None);
            }
            _ => {}
        }
    }
    // Only the deepest directory with a rule is named, because those above it include its bytes.
    let mut named: Vec<&PathContents> = Vec::new();
    for directory in contents.directories.iter().rev() {
        let Some(what) = remedy(&directory.path) else { continue };
        let bytes = directory.held.total_bytes;
        if counts(bytes) && !named.iter().any(|below| is_above(directory, below)) {
            named.push(directory);
            add(bytes, format!("{} takes {}: {what}", directory.path, size(bytes)), None);
        }
    }
    found.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
    found.into_iter().take(HINTS_MAX).map(|(_, hint)| hint).collect()
}

fn percent(bytes: u64, all: u64) -> u64 {
    bytes.saturating_mul(100) / all.max(1)
}

/// A size for people.
fn size(bytes: u64) -> String {
    let tenths = |unit: u64| {
        let tenths = bytes.saturating_mul(10) / unit;
        format!("{}.{}", tenths / 10, tenths % 10)
    };
    if bytes >= 1 << 30 { format!("{} GiB", tenths(1 << 30)) } else { format!("{} MiB", tenths(1 << 20)) }
}

#[cfg(test)]
mod tests {
    use headwater_api::{HeldBytes, KindContents, PartitionContents};

    use super::*;

    const MIB: u64 = 1 << 20;

    fn held(mib: u64) -> HeldBytes {
        HeldBytes { total_bytes: mib * MIB, ram_bytes: mib * MIB, ..HeldBytes::default() }
    }

    fn contents(file_system: &str, free_mib: u64, kinds: &[(ContentsKind, u64)]) -> CacheContents {
        let kind = |(kind, mib): &(ContentsKind, u64)| KindContents { kind: *kind, held: held(*mib) };
        CacheContents {
            held: held(kinds.iter().map(|(_, mib)| mib).sum()),
            kinds: kinds.iter().map(kind).collect(),
            partitions: vec![PartitionContents {
                number: 1,
                file_system: file_system.to_owned(),
                held: held(free_mib),
                free_bytes: free_mib * MIB,
                remarks: Vec::new(),
            }],
            ..CacheContents::default()
        }
    }

    fn directory(path: &str, mib: u64) -> PathContents {
        PathContents { partition: 1, path: path.to_owned(), kind: ContentsKind::File, held: held(mib) }
    }

    #[test]
    fn free_blocks_are_trimmed_by_the_command_of_their_file_system() {
        let kinds = [(ContentsKind::File, 1000), (ContentsKind::Free, 1229)];
        let linux = hints(&contents("ext4", 1229, &kinds), "desk-1", true);
        assert_eq!(linux.len(), 1);
        assert_eq!(linux[0].message, "fstrim in the guest frees up to 1.2 GiB of deleted files");
        assert_eq!(linux[0].command.as_deref(), Some("headwater machine trim desk-1"));
        let windows = hints(&contents("NTFS", 1229, &kinds), "desk-1", true);
        assert_eq!(windows[0].command.as_deref(), Some("headwater machine exec desk-1 -- defrag /C /L"));
        // In a machine that is off no command can run.
        assert_eq!(hints(&contents("ext4", 1229, &kinds), "desk-1", false)[0].command, None);
    }

    #[test]
    fn what_takes_little_is_no_hint() {
        let little = [(ContentsKind::File, 10_000), (ContentsKind::Free, 100), (ContentsKind::Swap, 31)];
        assert_eq!(hints(&contents("ext4", 100, &little), "desk-1", true), []);
    }

    #[test]
    fn the_largest_gain_comes_first() {
        let kinds = [(ContentsKind::Swap, 600), (ContentsKind::Journal, 128), (ContentsKind::File, 272)];
        let mut contents = contents("ext4", 0, &kinds);
        contents.directories = vec![
            directory("/", 272),
            directory("/var/log", 210),
            directory("/var/log/journal", 200),
            directory("/home", 60),
        ];
        let messages: Vec<String> =
            hints(&contents, "desk-1", true).into_iter().map(|hint| hint.message).collect();
        assert_eq!(messages.len(), 3, "{messages:?}");
        assert!(messages[0].starts_with("swap or the page file occupies 600.0 MiB (60 %)"), "{messages:?}");
        assert!(
            messages[1].starts_with("/var/log/journal takes 200.0 MiB: set SystemMaxUse="),
            "{messages:?}"
        );
        assert!(messages[2].starts_with("the journal of the file system occupies 128.0 MiB"), "{messages:?}");
    }

    #[test]
    fn a_directory_gets_the_hint_of_its_own_path_only() {
        let mut contents = contents("ext4", 0, &[(ContentsKind::File, 1000)]);
        let of_other = PathContents { partition: 2, ..directory("/var/log/journal", 100) };
        contents.directories = vec![
            directory("/var/log", 300),
            directory("/var/tmp", 250),
            directory("/home/x/tmp", 240),
            directory("/home/x/.cache", 230),
            directory("/tmp", 220),
            directory("/srv/var/log", 210),
            of_other,
        ];
        let messages: Vec<String> =
            hints(&contents, "desk-1", true).into_iter().map(|hint| hint.message).collect();
        let begins = [
            "/var/log takes 300.0 MiB: rotate",
            "/var/tmp takes 250.0 MiB: find the program",
            "/home/x/.cache takes 230.0 MiB: make the caches",
            "/tmp takes 220.0 MiB: mount it as tmpfs",
            "/var/log/journal takes 100.0 MiB: set",
        ];
        assert_eq!(messages.len(), begins.len(), "{messages:?}");
        for (message, begin) in messages.iter().zip(begins) {
            assert!(message.starts_with(begin), "{message}");
        }
        assert!(is_above(&directory("/var/log", 1), &directory("/var/log/journal", 1)));
        assert!(!is_above(&directory("/var/log", 1), &directory("/var/log2", 1)));
    }
}
