//! Runs programs that tests need, to their end. If a program is missing, the test fails with the package to
//! install.

use std::process::{Command, Output};

/// Runs a program of a Debian package, which must succeed; returns its output.
#[track_caller]
pub fn run(package: &str, program: &str, arguments: &[&str]) -> String {
    succeed(package, Command::new(program).args(arguments))
}

/// The same for a command.
#[track_caller]
pub fn succeed(package: &str, command: &mut Command) -> String {
    let output = output(package, command);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}{err}", output.status);
    out
}

/// Runs a command of a Debian package, which may fail.
#[track_caller]
pub fn output(package: &str, command: &mut Command) -> Output {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let program = command.get_program().to_owned();
    // Tools for file systems are not in the path of users. A command with a modified path is started through
    // a copy of this process, which takes longer than most tools do.
    if !std::env::split_paths(&path).any(|directory| directory.join(&program).exists()) {
        command.env("PATH", [path.as_os_str(), ":/usr/sbin:/sbin".as_ref()].join("".as_ref()));
    }
    match command.output() {
        Ok(output) => output,
        Err(error) => {
            panic!("cannot run {}: {error}; install it: apt-get install {package}", program.display())
        }
    }
}
