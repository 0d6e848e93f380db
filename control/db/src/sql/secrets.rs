//! SQL for the key that encrypts the secrets of the database. To recognise the key, the database stores a known text that is encrypted
//! with it: the mark.
//!
//! `take_key` stores the mark for the first key, and refuses a key that does not decrypt the mark. `change_key` encrypts each secret and
//! the mark again, in one transaction. The cipher is in [`crate::secrets`].

use crate::error::DbError;
use crate::secrets::SecretsKey;
use crate::sql::Unit;
use crate::sql::statement::{Insert, Statement};

/// The name of the key in `secrets_keys`.
const PURPOSE: &str = "secrets";

/// The known text.
const MARK: &str = "headwater";

/// The column of the mark. It is authenticated together with the mark, as for each secret.
const MARK_COLUMN: &str = "secrets_keys.mark";

/// The columns with secrets: the table, the column or columns that name a row, and the column with the secret.
const COLUMNS: [(&str, &str, &str); 6] = [
    ("machines", "uuid", "ssh_host_key_private"),
    ("user_data", "machine", "text"),
    ("catalogs", "name", "user_data"),
    ("schemes", "catalog || ' ' || version", "user_data"),
    ("authorities", "purpose", "key"),
    ("connections", "name", "secret"),
];

/// The error if the mark was not made with the given key.
fn other_key(database_name: &str) -> DbError {
    DbError::OtherSecretsKey { place: database_name.to_owned() }
}

impl Unit {
    async fn mark(&mut self) -> Result<Option<Vec<u8>>, DbError> {
        let find = Statement::new("SELECT mark FROM secrets_keys WHERE purpose = $1").bind(PURPOSE);
        self.row(find).await?.map(|row| row.get("mark")).transpose()
    }

    /// Whether a key was given before.
    pub(crate) async fn has_key(&mut self) -> Result<bool, DbError> {
        Ok(self.mark().await?.is_some())
    }

    /// Stores the mark of the first key. Fails if a mark exists that this key does not decrypt. `database_name` is the database's
    /// address, for the message.
    pub(crate) async fn take_key(&mut self, key: &SecretsKey, database_name: &str) -> Result<(), DbError> {
        if let Some(mark) = self.mark().await? {
            let is_it = key.decrypt(MARK_COLUMN, PURPOSE, mark).as_deref() == Some(MARK);
            return if is_it { Ok(()) } else { Err(other_key(database_name)) };
        }
        let mark = key.encrypt(MARK_COLUMN, PURPOSE, MARK)?;
        let insert = Insert::into("secrets_keys").set("purpose", PURPOSE).set("mark", mark);
        self.add(insert, || "key of the secrets".to_owned()).await
    }

    /// Decrypts all secrets and encrypts them with a new key. Returns how many there are. The key of this unit stays the old one: the
    /// database has to be opened again with the new key after the commit.
    pub(crate) async fn change_key(&mut self, new: &SecretsKey) -> Result<u64, DbError> {
        let mut count = 0;
        for (table, id, secret) in COLUMNS {
            let all =
                format!("SELECT {id} AS id, {secret} AS secret FROM {table} WHERE {secret} IS NOT NULL");
            for row in self.rows(Statement::new(all)).await? {
                let (name, stored): (String, Vec<u8>) = (row.get("id")?, row.get("secret")?);
                let column = format!("{table}.{secret}");
                let text = self.key.decrypt(&column, &name, stored)?;
                let update = format!("UPDATE {table} SET {secret} = $1 WHERE {id} = $2");
                let update = Statement::new(update).bind(new.encrypt(&column, &name, &text)?).bind(name);
                self.run(update).await?;
                count += 1;
            }
        }
        // Makes the commit empty SQLite's WAL, which may still have secrets that are encrypted with the old key.
        self.has_removed = true;
        let update = Statement::new("UPDATE secrets_keys SET mark = $1 WHERE purpose = $2");
        let mark = new.encrypt(MARK_COLUMN, PURPOSE, MARK)?;
        self.run(update.bind(mark).bind(PURPOSE)).await?;
        Ok(count)
    }
}
