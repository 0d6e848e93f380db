//! Writes the iPXE script of one machine.
//!
//! iPXE splits lines into words at blanks, replaces `${name}`, and interprets `||`, `&&`, quotation marks and `\`. So
//! a value is written only if all of its characters are plain.

use std::net::Ipv4Addr;

/// The longest kernel command line. x86 accepts 2,048 bytes, and the loader adds some.
pub const OPTIONS_BYTES_MAX: usize = 1800;
/// The pause before a machine tries again, in seconds.
pub(crate) const RETRY_S: u32 = 5;

/// Why a script cannot be written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScriptError {
    /// A character that iPXE interprets, or that is not printable.
    #[error(
        "{what} has the character '{}', which is not allowed in a boot script; allowed are letters, digits and . , : = / @ + - _ %",
        .character.escape_debug()
    )]
    Character {
        /// Which value.
        what: &'static str,
        /// The character.
        character: char,
    },
    /// The kernel command line is too long.
    #[error("the kernel command line has {0} bytes; the maximum is {OPTIONS_BYTES_MAX}")]
    Long(usize),
}

/// The values in the boot script of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boot {
    /// The machine's name.
    pub machine: String,
    /// The version that it boots, as text for people.
    pub version: String,
    /// The address of the boot server.
    pub server: Ipv4Addr,
    /// The port of its HTTP server.
    pub port: u16,
    /// The path of this script on the HTTP server.
    pub script: String,
    /// The path of the kernel.
    pub kernel: String,
    /// The path of the initramfs.
    pub initrd: String,
    /// The path of the machine's settings.
    pub settings: String,
    /// The kernel command line, of the image.
    pub options: String,
}

/// The script that boots a machine. If a step fails, the machine fetches its script again.
pub fn script(boot: &Boot) -> Result<String, ScriptError> {
    let machine = word("the name of the machine", &boot.machine)?;
    let version = word("the name of the version", &boot.version)?;
    let base = format!("http://{}:{}", boot.server, boot.port);
    let again = word("the path of the script", &boot.script)?;
    let kernel = word("the path of the kernel", &boot.kernel)?;
    let initrd = word("the path of the initramfs", &boot.initrd)?;
    let settings = word("the path of the settings", &boot.settings)?;
    let options = check_options(&boot.options)?;
    Ok(format!(
        "#!ipxe\n\
         echo headwater: {machine} boots {version}\n\
         imgfree\n\
         kernel --name kernel {base}{kernel} initrd=initrd initrd=settings {options} || goto failed\n\
         initrd --name initrd {base}{initrd} || goto failed\n\
         initrd --name settings {base}{settings} || goto failed\n\
         boot || goto failed\n\
         {}",
        again_after(&format!("{machine} could not be booted"), &base, &again)
    ))
}

/// The script of a machine that cannot boot now. It shows the reason, waits, and fetches the script again.
pub fn refusal(
    machine: &str,
    why: &str,
    server: Ipv4Addr,
    port: u16,
    path: &str,
) -> Result<String, ScriptError> {
    let machine = word("the name of the machine", machine)?;
    let path = word("the path of the script", path)?;
    let base = format!("http://{server}:{port}");
    Ok(format!(
        "#!ipxe\n\
         echo headwater: {machine}: {}\n\
         {}",
        plain(why),
        again_after(&format!("{machine} does not boot"), &base, &path)
    ))
}

fn again_after(what: &str, base: &str, path: &str) -> String {
    format!(
        ":failed\n\
         echo headwater: {what}, trying again in {RETRY_S} s\n\
         sleep {RETRY_S}\n\
         chain --replace {base}{path} || goto failed\n"
    )
}

/// A kernel command line as it is written in a script: words of plain characters, separated by single blanks.
pub fn check_options(options: &str) -> Result<String, ScriptError> {
    if options.len() > OPTIONS_BYTES_MAX {
        return Err(ScriptError::Long(options.len()));
    }
    let words = options.split_ascii_whitespace().map(|option| word("an option of the kernel", option));
    Ok(words.collect::<Result<Vec<_>, _>>()?.join(" "))
}

pub(crate) fn word(what: &'static str, text: &str) -> Result<String, ScriptError> {
    match text.chars().find(|character| !is_plain(*character)) {
        Some(character) => Err(ScriptError::Character { what, character }),
        None => Ok(text.to_owned()),
    }
}

/// Whether neither iPXE nor a shell interprets the character.
const fn is_plain(character: char) -> bool {
    character.is_ascii_alphanumeric()
        || matches!(character, '.' | ',' | ':' | '=' | '/' | '@' | '+' | '-' | '_' | '%')
}

/// Text for people, with other than plain characters replaced by `?`.
pub(crate) fn plain(text: &str) -> String {
    let mut shown: String =
        text.chars().take(300).map(|c| if is_plain(c) || c == ' ' { c } else { '?' }).collect();
    if shown.trim().is_empty() {
        shown = "no reason given".to_owned();
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boot() -> Boot {
        Boot {
            machine: "pc-1".into(),
            version: "debian@3".into(),
            server: Ipv4Addr::new(10, 0, 0, 2),
            port: 8069,
            script: "/b/52-54-00-01-02-03/boot.ipxe".into(),
            kernel: "/a/9f/kernel".into(),
            initrd: "/a/9f/initrd".into(),
            settings: "/t/00ff/settings.cpio".into(),
            options: "console=ttyS0 quiet\n  loglevel=4".into(),
        }
    }

    #[test]
    fn a_script_names_kernel_initramfs_and_settings() {
        let text = script(&boot()).unwrap();
        assert_eq!(
            text,
            "#!ipxe\n\
             echo headwater: pc-1 boots debian@3\n\
             imgfree\n\
             kernel --name kernel http://10.0.0.2:8069/a/9f/kernel initrd=initrd initrd=settings console=ttyS0 quiet \
             loglevel=4 || goto failed\n\
             initrd --name initrd http://10.0.0.2:8069/a/9f/initrd || goto failed\n\
             initrd --name settings http://10.0.0.2:8069/t/00ff/settings.cpio || goto failed\n\
             boot || goto failed\n\
             :failed\n\
             echo headwater: pc-1 could not be booted, trying again in 5 s\n\
             sleep 5\n\
             chain --replace http://10.0.0.2:8069/b/52-54-00-01-02-03/boot.ipxe || goto failed\n"
        );
    }

    #[test]
    fn a_value_with_ipxe_syntax_is_refused() {
        for bad in [
            "a b",
            "a||b",
            "a&&b",
            "${net0/mac}",
            "a\nshell",
            "a\"b",
            "a'b",
            "a\\b",
            "a#b",
            "a;b",
            "\u{e4}",
            "a\0b",
        ] {
            for change in [
                |boot: &mut Boot, bad: &str| boot.machine = bad.into(),
                |boot: &mut Boot, bad: &str| boot.version = bad.into(),
                |boot: &mut Boot, bad: &str| boot.kernel = bad.into(),
            ] {
                let mut boot = boot();
                change(&mut boot, bad);
                assert!(matches!(script(&boot), Err(ScriptError::Character { .. })), "{bad:?}");
            }
        }
        let options = Boot { options: "root=\"x\"".into(), ..boot() };
        let why = script(&options).unwrap_err().to_string();
        assert_eq!(
            why,
            "an option of the kernel has the character '\\\"', which is not allowed in a boot script; allowed are letters, digits \
             and . , : = / @ + - _ %"
        );
        let long = Boot { options: "x".repeat(OPTIONS_BYTES_MAX + 1), ..boot() };
        assert_eq!(script(&long), Err(ScriptError::Long(1801)));
    }

    #[test]
    fn a_reason_is_shown_without_ipxe_syntax() {
        let text = refusal("pc-1", "no ${x} || shell\nreboot", Ipv4Addr::LOCALHOST, 80, "/b").unwrap();
        assert!(text.contains("echo headwater: pc-1: no ??x? ?? shell?reboot\n:failed\n"), "{text}");
        assert!(refusal("pc 1", "x", Ipv4Addr::LOCALHOST, 80, "/b").is_err());
    }
}
