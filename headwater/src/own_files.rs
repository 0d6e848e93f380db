//! Detects paths such as `/dev/stdin` and `/dev/fd/63`, which mean open files of the process that opens them: the
//! daemon would open one of its own files.

use std::path::{Component, Path, PathBuf};

use headwater_api::{Problem, ProblemKind};

/// The most links that are followed, as in the kernel.
const LINKS_MAX: usize = 40;

const ADVICE: &str = "name the file by its path on disk, or pass its contents as standard input: 'headwater image import - --name \
                      IMAGE < FILE', or 'COMMAND | headwater image import - --name IMAGE'";

/// Fails for an absolute path that means another file in every process.
pub fn refuse(path: &Path) -> Result<(), Problem> {
    if part(path).is_none() {
        return Ok(());
    }
    let why = format!(
        "cannot use '{}': this path stands for an open file of each process that uses it, so the daemon would open its own file, not yours",
        path.display()
    );
    Err(Problem::new(ProblemKind::Invalid, why).advise(ADVICE))
}

/// Whether an absolute path means standard input.
pub fn is_standard_input(path: &Path) -> bool {
    part(path).is_some_and(|part| part == Path::new("fd/0"))
}

/// The part of a path below `/proc/self`, if the path leads there. Links are followed one by one, because the targets
/// of links in `/proc` do not show that.
fn part(path: &Path) -> Option<PathBuf> {
    let mut left: Vec<PathBuf> = parts(path);
    let mut at = PathBuf::from("/");
    let mut links = 0;
    while let Some(next) = left.pop() {
        if next == Path::new("..") {
            at.pop();
            continue;
        }
        at.push(next);
        let of_fd = at == Path::new("/dev/fd");
        if of_fd || at == Path::new("/proc/self") || at == Path::new("/proc/thread-self") {
            left.extend(of_fd.then(|| PathBuf::from("fd")));
            return Some(left.iter().rev().collect());
        }
        if let Ok(target) = at.read_link() {
            links += 1;
            if links > LINKS_MAX {
                return None;
            }
            at.pop();
            if target.is_absolute() {
                at = PathBuf::from("/");
            }
            left.extend(parts(&target));
        }
    }
    None
}

/// The components of a path, in reverse order.
fn parts(path: &Path) -> Vec<PathBuf> {
    let named = path.components().filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir));
    named.map(|part| PathBuf::from(part.as_os_str())).rev().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn what_is_open_is_told_from_files() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link, circle) =
            (dir.path().join("disk"), dir.path().join("link"), dir.path().join("circle"));
        std::fs::write(&file, "x").unwrap();
        symlink("/dev/fd/7", &link).unwrap();
        symlink("circle", &circle).unwrap();
        let open = std::fs::File::open(&file).unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&open);
        for own in [
            link,
            format!("/dev/fd/{number}").into(),
            format!("/proc/self/fd/{number}").into(),
            "/proc/thread-self/fd/3".into(),
            "/dev/../dev/./fd/3".into(),
            "/proc/self/root/etc/passwd".into(),
            "/dev/stdin".into(),
            "/dev/stdout".into(),
        ] {
            let problem = refuse(&own).unwrap_err();
            assert!(problem.message.contains(&own.display().to_string()), "{problem}");
        }
        // The path by which the daemon opens the saved standard input.
        let by_process = format!("/proc/{}/fd/{number}", std::process::id()).into();
        for good in [file, circle, dir.path().join("none"), "/dev/zero".into(), by_process] {
            refuse(&good).unwrap();
        }
        for (path, expected) in
            [("/dev/stdin", true), ("/dev/fd/0", true), ("/proc/self/fd/0", true), ("/dev/fd/1", false)]
        {
            assert_eq!(is_standard_input(Path::new(path)), expected, "{path}");
        }
    }
}
