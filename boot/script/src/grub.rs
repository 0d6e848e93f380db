//! Writes GRUB configuration: one for each machine, and a first one that makes each machine fetch its own.
//!
//! A value is written only if all of its characters are plain, as in an iPXE script: GRUB interprets blanks,
//! quotation marks, `$`, `\`, `;`, `&`, `|`, `<`, `>`, braces, brackets, `*`, `?` and `#`.

use std::net::Ipv4Addr;

use crate::script::{Boot, RETRY_S, ScriptError, check_options, plain, word};

/// The first configuration, which is the same for all machines. In a loop, it fetches and runs the configuration of
/// the machine's card. A configuration that cannot boot returns to this loop: if it fetched its successor itself,
/// GRUB would keep all of them in memory.
pub fn start(server: Ipv4Addr, port: u16) -> String {
    let device = device(server, port);
    format!(
        "while true; do\n\
         \x20 echo \"headwater: asking {server} what to boot\"\n\
         \x20 configfile {device}/b/$net_default_mac/grub.cfg\n\
         \x20 echo \"headwater: trying again in {RETRY_S} s\"\n\
         \x20 sleep {RETRY_S}\n\
         done\n"
    )
}

/// The configuration that boots a machine.
pub fn configuration(boot: &Boot) -> Result<String, ScriptError> {
    let machine = word("the name of the machine", &boot.machine)?;
    let version = word("the name of the version", &boot.version)?;
    let kernel = word("the path of the kernel", &boot.kernel)?;
    let initrd = word("the path of the initramfs", &boot.initrd)?;
    let settings = word("the path of the settings", &boot.settings)?;
    let options = check_options(&boot.options)?;
    let device = device(boot.server, boot.port);
    Ok(format!(
        "echo \"headwater: {machine} boots {version}\"\n\
         if linux {device}{kernel} {options}; then\n\
         \x20 if initrd {device}{initrd} {device}{settings}; then\n\
         \x20   boot\n\
         \x20 fi\n\
         fi\n\
         echo \"headwater: {machine} could not be booted\"\n"
    ))
}

/// The configuration of a machine that cannot boot now. It shows the reason.
pub fn refusal(machine: &str, why: &str) -> Result<String, ScriptError> {
    let machine = word("the name of the machine", machine)?;
    Ok(format!("echo \"headwater: {machine}: {}\"\n", plain(why)))
}

pub(crate) fn device(server: Ipv4Addr, port: u16) -> String {
    if port == 80 { format!("(http,{server})") } else { format!("(http,{server}:{port})") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boot() -> Boot {
        Boot {
            machine: "pc-1".into(),
            version: "debian@3".into(),
            server: Ipv4Addr::new(10, 0, 0, 2),
            port: 80,
            script: "/b/52-54-00-01-02-03/grub.cfg".into(),
            kernel: "/a/9f/kernel".into(),
            initrd: "/a/9f/initrd".into(),
            settings: "/t/00ff/settings.cpio".into(),
            options: "console=ttyS0 quiet".into(),
        }
    }

    #[test]
    fn a_configuration_names_kernel_initramfs_and_settings() {
        let text = configuration(&boot()).unwrap();
        assert!(text.contains("if linux (http,10.0.0.2)/a/9f/kernel console=ttyS0 quiet; then\n"), "{text}");
        let initrd = "initrd (http,10.0.0.2)/a/9f/initrd (http,10.0.0.2)/t/00ff/settings.cpio; then\n";
        assert!(text.contains(initrd), "{text}");
        let start = start(Ipv4Addr::new(10, 0, 0, 2), 80);
        assert!(start.contains("  configfile (http,10.0.0.2)/b/$net_default_mac/grub.cfg\n"), "{start}");
        let other = configuration(&Boot { port: 8069, ..boot() }).unwrap();
        assert!(other.contains("linux (http,10.0.0.2:8069)/a/9f/kernel"), "{other}");
    }

    #[test]
    fn a_value_with_grub_syntax_is_refused() {
        for bad in [
            "a b", "$a", "'a", "\"a", "a\\b", "a;b", "a&b", "a|b", "<a", ">a", "{a", "[a", "a*", "a?", "#a",
            "a\nb",
        ] {
            for change in [
                |boot: &mut Boot, bad: &str| boot.machine = bad.into(),
                |boot: &mut Boot, bad: &str| boot.version = bad.into(),
                |boot: &mut Boot, bad: &str| boot.settings = bad.into(),
            ] {
                let mut boot = boot();
                change(&mut boot, bad);
                assert!(matches!(configuration(&boot), Err(ScriptError::Character { .. })), "{bad:?}");
            }
        }
        let text = refusal("pc-1", "no \"$x\"; reboot").unwrap();
        assert_eq!(text, "echo \"headwater: pc-1: no ??x?? reboot\"\n");
    }
}
