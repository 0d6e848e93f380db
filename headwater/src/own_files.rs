//! Paths that lead to what the process that opens them has open, as `/dev/stdin` and `/dev/fd/63` do: the daemon would open a
//! file of its own there.

use std::path::{Component, Path, PathBuf};

use headwater_api::{Problem, ProblemKind};

/// As many links as the kernel follows.
const LINKS_MAX: usize = 40;

const ADVICE: &str = "name the file by its own path, or give what it holds as the standard input: 'headwater image import - --name \
                      IMAGE < FILE', or 'COMMAND | headwater image import - --name IMAGE'";

/// Refuses a path that means another file to every process. For paths that are absolute.
pub fn refuse(path: &Path) -> Result<(), Problem> {
    if part(path).is_none() {
        return Ok(());
    }
    let why = format!(
        "cannot use '{}': it means an open file of the process that opens it, and that is the daemon",
        path.display()
    );
    Err(Problem::new(ProblemKind::Invalid, why).advise(ADVICE))
}

/// Whether an absolute path is the standard input.
pub fn is_standard_input(path: &Path) -> bool {
    part(path).is_some_and(|part| part == Path::new("fd/0"))
}

/// What of `/proc/self` a path leads to, if it does. Links are followed one by one: where those in `/proc` end says nothing.
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

/// A path's parts, the first one last.
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
        // The name by which the daemon finds what was kept of standard input.
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
