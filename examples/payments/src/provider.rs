//! A payment provider that knows the keys that it was given. Here a table; in earnest a service of somebody else's, of which
//! nothing is in our transactions.

use serde::Serialize;
use sqlx::PgPool;

/// A charge, as the provider tells of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, sqlx::FromRow)]
pub struct Charge {
    /// The provider's number.
    pub id: i64,
    /// What was charged.
    pub cents: i64,
}

/// The provider's interface.
#[derive(Debug, Clone)]
pub struct Provider {
    pool: PgPool,
}

impl Provider {
    /// Makes its table where there is none.
    ///
    /// # Errors
    ///
    /// When the database does not do it.
    pub async fn open(pool: PgPool) -> Result<Self, sqlx::Error> {
        sqlx::query(include_str!("../queries/provider_create.sql")).execute(&pool).await?;
        Ok(Self { pool })
    }

    /// Charges, or says what it charged under this key before.
    ///
    /// # Errors
    ///
    /// When there is no answer: it may have charged.
    pub async fn charge(&self, key: &str, cents: i64) -> Result<Charge, sqlx::Error> {
        sqlx::query_as(include_str!("../queries/charge_insert.sql"))
            .bind(key)
            .bind(cents)
            .fetch_one(&self.pool)
            .await
    }

    /// What it charged under this key.
    ///
    /// # Errors
    ///
    /// When there is no answer.
    pub async fn find(&self, key: &str) -> Result<Option<Charge>, sqlx::Error> {
        sqlx::query_as(include_str!("../queries/charge_by_key.sql"))
            .bind(key)
            .fetch_optional(&self.pool)
            .await
    }

    /// One charge by its number.
    ///
    /// # Errors
    ///
    /// When there is no answer.
    pub async fn get(&self, id: i64) -> Result<Option<Charge>, sqlx::Error> {
        sqlx::query_as(include_str!("../queries/charge_by_id.sql")).bind(id).fetch_optional(&self.pool).await
    }
}
