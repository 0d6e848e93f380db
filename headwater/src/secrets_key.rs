//! The key of the secrets in a database. It is in a file outside of the database, so a copy of the database alone does not contain
//! it. (`headwater backup` copies both.)
//!
//! | the database | the file | result |
//! |---|---|---|
//! | had no key yet | is missing | a key is made, and written before it is used |
//! | had no key yet, or has this key | holds a key | the key is used |
//! | has a key | is missing, or holds another key | refused |
//!
//! A change of the key writes the new key to `FILE.new`, then changes the database, then renames the file. If that breaks off, the next
//! start finds which of the two keys is that of the database.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use headwater_api::{Problem, ProblemKind};
use headwater_db::{DbError, SECRETS_KEY_BYTES, Secrets, SecretsKey};

use crate::data_dir::DataDir;
use crate::replace;

/// The file in a data directory, and in a backup.
pub const FILE_NAME: &str = "secrets.key";

/// The name of the file with the next key, while the key is replaced.
pub const NEWER_FILE_NAME: &str = "secrets.key.new";

/// The name of the key among the credentials that the service manager passes.
const CREDENTIAL: &str = "secrets-key";

/// More bytes than a key file has.
const FILE_MAX_BYTES: u64 = 256;

/// The permissions that the file must not have: any access by other users, and writing by its group.
const TOO_OPEN: u32 = 0o027;

/// The bytes of a key.
type KeyBytes = [u8; SECRETS_KEY_BYTES];

/// The file with the key.
#[derive(Clone, Debug)]
pub struct SecretsKeyFile {
    path: PathBuf,
    /// The service manager has made it, and says who can read it.
    is_credential: bool,
}

impl SecretsKeyFile {
    /// The file that was named, else the credential of the service, else the file in the data directory.
    pub fn of(data_dir: &DataDir, named: Option<&Path>) -> Self {
        if let Some(path) = named {
            return Self { path: path.to_owned(), is_credential: false };
        }
        let credentials = std::env::var_os("CREDENTIALS_DIRECTORY");
        let credential = credentials.map(|dir| Path::new(&dir).join(CREDENTIAL)).filter(|file| file.exists());
        match credential {
            Some(path) => Self { path, is_credential: true },
            None => Self::in_directory(data_dir.path()),
        }
    }

    /// The file in a directory.
    pub fn in_directory(dir: &Path) -> Self {
        Self { path: dir.join(FILE_NAME), is_credential: false }
    }

    /// Where it is.
    pub fn display(&self) -> std::path::Display<'_> {
        self.path.display()
    }

    /// Whether it is there.
    pub fn exists(&self) -> bool {
        self.path.exists()
    }

    /// Gives a database its key, and makes a key if there is no file and the database never had a key.
    pub async fn unlock(&self, database: &dyn Secrets) -> anyhow::Result<()> {
        let bytes = match self.read()? {
            Some(bytes) => bytes,
            None => {
                if database.has_key().await? {
                    return Err(self.missing().into());
                }
                self.make()?
            }
        };
        let refused = match database.unlock(SecretsKey::new(&bytes)?).await {
            Ok(()) => return Ok(()),
            Err(DbError::OtherSecretsKey { place }) => self.other(&place),
            Err(error) => return Err(error.into()),
        };
        // A change of the key may have broken off after it was in the database.
        let newer = self.newer();
        let Some(bytes) = newer.read()? else { return Err(refused.into()) };
        match database.unlock(SecretsKey::new(&bytes)?).await {
            Ok(()) => newer.rename_to(self),
            Err(DbError::OtherSecretsKey { .. }) => Err(refused.into()),
            Err(error) => Err(error.into()),
        }
    }

    /// Encrypts the secrets of an open database with a new key. Returns how many there are.
    pub async fn rotate(&self, database: &dyn Secrets) -> anyhow::Result<u64> {
        if self.is_credential {
            let message =
                format!("cannot replace {}: it is a credential of the service", self.path.display());
            return Err(Problem::new(ProblemKind::Invalid, message)
                .advise("decrypt it to a file, name the file with --secrets-key, and encrypt the new file with 'systemd-creds encrypt'")
                .into());
        }
        let newer = self.newer();
        let bytes = random()?;
        // Durable before anything is encrypted with it.
        newer.write(&bytes)?;
        let count = database.rotate(&SecretsKey::new(&bytes)?).await;
        let count = count.context("cannot encrypt the secrets in the database with another key")?;
        newer.rename_to(self)?;
        Ok(count)
    }

    fn newer(&self) -> Self {
        let mut path = self.path.clone().into_os_string();
        path.push(".new");
        Self { path: path.into(), is_credential: self.is_credential }
    }

    fn rename_to(&self, to: &Self) -> anyhow::Result<()> {
        let failed = || format!("cannot rename {} to {}", self.path.display(), to.path.display());
        std::fs::rename(&self.path, &to.path).with_context(failed)?;
        let dir = to.path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(dir).and_then(|dir| dir.sync_all()).with_context(failed)
    }

    /// The key in it. `None`: there is no such file.
    fn read(&self) -> anyhow::Result<Option<KeyBytes>> {
        let failed = || format!("cannot read {}", self.path.display());
        let file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(failed),
        };
        let mode = file.metadata().with_context(failed)?.mode();
        if !self.is_credential && mode & TOO_OPEN != 0 {
            let path = self.path.display();
            let why = format!(
                "cannot use the key of the secrets: others can read or write {path} (mode {:o})",
                mode & 0o777
            );
            return Err(Problem::new(ProblemKind::Invalid, why).advise(format!("'chmod 600 {path}'")).into());
        }
        let mut text = String::new();
        let read = file.take(FILE_MAX_BYTES).read_to_string(&mut text);
        match read {
            Err(error) if error.kind() != ErrorKind::InvalidData => Err(error).with_context(failed),
            _ => parse(text.trim()).map(Some).ok_or_else(|| {
                let why = format!(
                    "the key of the secrets in {} is damaged: it is not {} hexadecimal digits",
                    self.path.display(),
                    SECRETS_KEY_BYTES * 2
                );
                Problem::new(ProblemKind::Damaged, why).advise("restore it from a backup").into()
            }),
        }
    }

    fn make(&self) -> anyhow::Result<KeyBytes> {
        let bytes = random()?;
        self.write(&bytes)?;
        tracing::info!(file = %self.path.display(), "made the key of the secrets in the database");
        Ok(bytes)
    }

    fn write(&self, bytes: &KeyBytes) -> anyhow::Result<()> {
        let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let failed = || format!("cannot write the key of the secrets to {}", self.path.display());
        replace::replace(&self.path, format!("{digits}\n").as_bytes(), 0o600).with_context(failed)?;
        // The umask may have been stricter, and an owner must be able to read it again.
        std::fs::set_permissions(&self.path, PermissionsExt::from_mode(0o600)).with_context(failed)
    }

    fn missing(&self) -> Problem {
        let path = self.path.display();
        let why = format!("the secrets in the database are encrypted, and their key {path} is missing");
        Problem::new(ProblemKind::NotFound, why).advise(ADVICE)
    }

    fn other(&self, place: &str) -> Problem {
        let path = self.path.display();
        let why =
            format!("the secrets in the database {place} are encrypted with another key than that in {path}");
        Problem::new(ProblemKind::Invalid, why).advise(ADVICE)
    }
}

/// What to do without the right key.
const ADVICE: &str = "restore that file from a backup, or name the right one with --secrets-key; all controllers of one database have the \
                      same key, so copy that of the first one";

fn random() -> anyhow::Result<KeyBytes> {
    let mut bytes = [0; SECRETS_KEY_BYTES];
    let read = File::open("/dev/urandom").and_then(|mut random| random.read_exact(&mut bytes));
    read.context("cannot make a key for the secrets in the database")?;
    Ok(bytes)
}

fn parse(text: &str) -> Option<KeyBytes> {
    let is_key = text.len() == SECRETS_KEY_BYTES * 2 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let mut bytes = [0; SECRETS_KEY_BYTES];
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)).filter(|_| is_key) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    is_key.then_some(bytes)
}

#[cfg(test)]
mod tests {
    use headwater_db::sqlite::SqliteDatabase;
    use headwater_db::{AuthorityRecord, Database as _};

    use super::*;

    async fn open(dir: &Path) -> SqliteDatabase {
        SqliteDatabase::open(&dir.join("headwater.db")).await.unwrap()
    }

    async fn refused(file: &SecretsKeyFile, dir: &Path) -> String {
        let error = file.unlock(&open(dir).await).await.unwrap_err();
        error.downcast_ref::<Problem>().unwrap().to_string()
    }

    #[tokio::test]
    async fn a_key_is_made_once_and_another_one_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = SecretsKeyFile::in_directory(dir.path());
        file.unlock(&open(dir.path()).await).await.unwrap();
        let text = std::fs::read_to_string(&file.path).unwrap();
        assert_eq!((text.len(), file.path.metadata().unwrap().mode() & 0o777), (65, 0o600));
        file.unlock(&open(dir.path()).await).await.unwrap();
        assert_eq!(std::fs::read_to_string(&file.path).unwrap(), text);

        std::fs::set_permissions(&file.path, PermissionsExt::from_mode(0o644)).unwrap();
        assert!(refused(&file, dir.path()).await.contains("others can read or write"));
        std::fs::remove_file(&file.path).unwrap();
        let missing = refused(&file, dir.path()).await;
        assert!(missing.contains("is missing") && missing.contains("--secrets-key"), "{missing}");
        assert!(!file.exists(), "a key was made for a database that has another one");
        file.write(&[3; SECRETS_KEY_BYTES]).unwrap();
        assert!(refused(&file, dir.path()).await.contains("with another key than that in"));
        std::fs::write(&file.path, "0123\n").unwrap();
        assert!(refused(&file, dir.path()).await.contains("it is not 64 hexadecimal digits"));
    }

    #[tokio::test]
    async fn a_change_of_the_key_that_breaks_off_is_completed() {
        let dir = tempfile::tempdir().unwrap();
        let file = SecretsKeyFile::in_directory(dir.path());
        let authority = AuthorityRecord { key: "signs".to_owned(), certificate: "public".to_owned() };
        let database = open(dir.path()).await;
        file.unlock(&database).await.unwrap();
        let mut repo = database.write().await.unwrap();
        repo.hosts().add_authority(&authority).await.unwrap();
        repo.save().await.unwrap();
        let former = std::fs::read(&file.path).unwrap();
        assert_eq!(file.rotate(&database).await.unwrap(), 1);
        assert_ne!(std::fs::read(&file.path).unwrap(), former);
        assert!(!file.newer().exists());

        // The database has the new key, and the file was not renamed yet.
        std::fs::rename(&file.path, &file.newer().path).unwrap();
        std::fs::write(&file.path, &former).unwrap();
        std::fs::set_permissions(&file.path, PermissionsExt::from_mode(0o600)).unwrap();
        let database = open(dir.path()).await;
        file.unlock(&database).await.unwrap();
        assert!(!file.newer().exists());
        assert_eq!(database.read().await.unwrap().hosts().authority().await.unwrap(), Some(authority));
        file.newer().write(&[9; SECRETS_KEY_BYTES]).unwrap();
        file.unlock(&open(dir.path()).await).await.unwrap();
    }
}
